/* The submitter under several threads over the host runtime: submitter_threads END ROUNDS RING.
 * Each thread owns some blocks. It loads them behind its own compute, stores them behind its own loads, and compares
 * the bytes; by pools and by addresses, handed over and in its own thread; it waits, gives a wait up, fences and looks
 * on. END: drain (all ends first), close (the submitter is closed meanwhile), lose (the device is lost meanwhile),
 * abandon (closed without a look at the device). Built with a sanitizer: no race, no leak, no error. */
#include "kvp_submitter.h"
#include "test_hostrt.h"

enum { THREADS = 3, STREAMS = 4, BLOCKS = 12, BLOCK = 2048, ALL = THREADS * 2 * BLOCKS };
enum { H2D = cudaMemcpyHostToDevice, D2H = cudaMemcpyDeviceToHost };

static kvp_submitter *submitter;
static unsigned char *gpu, *cpu;
static const char *ending;
static int rounds;
static _Atomic uint64_t ids, ended_jobs, transfers, in_place_runs;
static pthread_mutex_t one_inline[2] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER};

static int drains(void) { return !strcmp(ending, "drain"); }

/* In this thread to the shared stream, as a server would, or to the submitter's thread where that is busy. 0: done. */
static int submit(kvp_job_status *job, int direction, unsigned in_place) {
    int code = 0;
    pthread_mutex_t *lock = &one_inline[direction == KVP_H2D];
    pthread_mutex_lock(lock);
    if (in_place && kvp_inline_free(submitter, direction)) {
        kvp_submit_options options = {.kind = direction == KVP_H2D ? H2D : D2H,
                                      .direction = (uint8_t)direction,
                                      .detail = KVP_COPIES,
                                      .blocked_ns = 1000000};
        kvp_submit_result result;
        uint64_t outstanding;
        do code = kvp_job_inline(submitter, job, &options, 5, &result, &outstanding);
        while (code == KVP_MORE_IS_LEFT && in_place % 3);
        in_place_runs++;
        if (code != KVP_MORE_IS_LEFT) goto out; /* else the rest is handed over */
    }
    code = kvp_job_push(submitter, job);
out:
    pthread_mutex_unlock(lock);
    if (code < 0) kvp_job_unused(submitter, job); /* refused: nothing has it */
    return code < 0 ? code : 0;
}

static kvp_job_status *request(int direction, int64_t gpu_first, int64_t cpu_first, cudaStream_t after, unsigned how) {
    uint64_t id = ids += 2;
    if (how % 4 == 0) { /* two jobs, of which the second's end implies the first's */
        enum { HALF = BLOCKS / 2 };
        uint64_t at[HALF], ends[] = {1, 2};
        kvp_bases bases[2] = {{0}};
        for (int i = 0; i < HALF; i++) at[i] = (uint64_t)i * BLOCK;
        for (int i = 0; i < 2; i++) {
            uint64_t g = (uintptr_t)gpu + (uint64_t)(gpu_first + i * HALF) * BLOCK;
            uint64_t c = (uintptr_t)cpu + (uint64_t)(cpu_first + i * HALF) * BLOCK;
            bases[i].dst = direction == KVP_H2D ? g : c;
            bases[i].src = direction == KVP_H2D ? c : g;
        }
        kvp_offsets offsets = {.count = HALF, .dst = at, .src = at, .size = BLOCK};
        kvp_addresses copies = {.offsets = &offsets, .bases = bases, .ends = ends, .lists = 1, .jobs = 2};
        kvp_job_status *jobs[2];
        int no = kvp_job_request_addresses(submitter, direction, id, &copies, after, 1, kvp_now_ns(), jobs);
        CHECK(!no || !drains());
        if (no) return NULL;
        kvp_job_release(jobs[0]);
        return jobs[1];
    }
    int64_t g[BLOCKS], c[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) g[i] = gpu_first + i, c[i] = cpu_first + (how % 4 == 1 ? i : (i * 5) % BLOCKS);
    if (how % 4 != 1)
        for (int i = 0; i < BLOCKS; i++) g[i] = gpu_first + (i * 5) % BLOCKS; /* the same blocks, neighbours apart */
    kvp_job_refused refused;
    kvp_request asked = {.submitter = submitter,
                         .refused = &refused,
                         .after = after,
                         .id = id,
                         .copies = BLOCKS,
                         .gpu_count = BLOCKS,
                         .cpu_count = BLOCKS,
                         .requested_ns = kvp_now_ns(),
                         .what = KVP_REQUEST_AFTER | (direction == KVP_D2H ? KVP_REQUEST_STORE : 0)};
    kvp_job_status *job = kvp_job_request(&asked, g, c);
    CHECK(job || !drains());
    if (job && submit(job, direction, how / 4 % 4)) {
        CHECK(!drains());
        kvp_job_release(job);
        return NULL;
    }
    return job;
}

/* Whether the job was carried out. */
static int ends(kvp_job_status *job, unsigned how) {
    int is = 0;
    if (how % 3 == 0) kvp_job_wait(submitter, job, 1000); /* given up, as a rule */
    while ((is = kvp_job_wait(submitter, job, UINT64_MAX)) == KVP_LOOK_AT_SIGNALS) continue;
    CHECK(is == 1);
    int done = __atomic_load_n(&job->state, __ATOMIC_ACQUIRE) == KVP_DONE;
    CHECK(done || !drains());
    kvp_job_release(job);
    transfers++;
    return done;
}

static int fence(kvp_job_status *job, cudaStream_t stream) {
    int is;
    while ((is = kvp_job_fence(submitter, job, stream)) == KVP_SIGNALS) continue;
    CHECK(!is || !drains());
    return is;
}

static void *caller(void *number) {
    int64_t first = 2 * BLOCKS * (int64_t)(intptr_t)number;
    unsigned seed = (unsigned)(intptr_t)number + 1;
    unsigned char *from = cpu + first * BLOCK, *to = from + BLOCKS * BLOCK;
    cudaStream_t compute;
    if (cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking)) return NULL; /* lost already */
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < BLOCKS * BLOCK; i += 32) from[i] = (unsigned char)rand_r(&seed);
        memset(to, 0, BLOCKS * BLOCK);
        if (rand_r(&seed) % 2) kvhostLaunchDelay(compute, (uint64_t)rand_r(&seed) % 200000);
        kvp_job_status *load = request(KVP_H2D, first, first, compute, (unsigned)rand_r(&seed));
        if (!load) break;
        if (fence(load, compute)) {
            ends(load, 1);
            break;
        }
        kvp_job_status *store = request(KVP_D2H, first, first + BLOCKS, compute, (unsigned)rand_r(&seed));
        if (rand_r(&seed) % 8 == 0) {
            kvp_submitter_stats is;
            kvp_submitter_read(submitter, &is);
        }
        int whole = ends(load, (unsigned)rand_r(&seed));
        if (!store) break;
        whole &= ends(store, (unsigned)rand_r(&seed));
        if (!whole) break;
        CHECK(!memcmp(from, to, BLOCKS * BLOCK));
    }
    cudaStreamSynchronize(compute);
    cudaStreamDestroy(compute);
    return NULL;
}

static void *listener(void *unused) {
    uint64_t some[7], n;
    int is;
    do {
        is = kvp_wait_ended(submitter);
        while ((n = kvp_take_ended(submitter, some, 7))) ended_jobs += n;
    } while (is >= 0);
    return unused;
}

int main(int argc, char **argv) {
    CHECK(argc > 3);
    ending = argv[1];
    rounds = atoi(argv[2]);
    alarm(250);
    kvhost_config runtime = {.depth = 40, .latency_ns = 500, .submit_ns = -1, .virtual_clock = 2};
    OK(kvhostReset(&runtime));
    gpu = device(ALL * BLOCK);
    cpu = pinned(ALL * BLOCK);
    cudaStream_t streams[2 * STREAMS + 3];
    for (int i = 0; i < 2 * STREAMS + 3; i++) streams[i] = new_stream();
    const uint64_t gpu_base = (uintptr_t)gpu, cpu_base = (uintptr_t)cpu;
    OK(kvp_ring_open(argv[3], "engine", NULL));
    static kvp_method_table methods;
    kvp_submitter_config config = {.copier = {.cuda = {.memcpy_async = cudaMemcpyAsync,
                                                       .memcpy_batch_async = cudaMemcpyBatchAsync,
                                                       .event_record = cudaEventRecord,
                                                       .event_query = cudaEventQuery,
                                                       .event_elapsed = cudaEventElapsedTime,
                                                       .stream_wait_event = cudaStreamWaitEvent,
                                                       .get_last_error = cudaGetLastError,
                                                       .runtime_version = 13000,
                                                       .stream_query = cudaStreamQuery,
                                                       .event_synchronize = cudaEventSynchronize,
                                                       .event_create = cudaEventCreateWithFlags,
                                                       .event_destroy = cudaEventDestroy},
                                              .batch_places = 0.041},
                                   .methods = &methods,
                                   .gpu = {.bases = &gpu_base, .blocks = ALL, .factor = 1},
                                   .cpu = {.bases = &cpu_base, .blocks = ALL, .factor = 1},
                                   .copy_bytes = BLOCK,
                                   .layers = 1,
                                   .depth = 40,
                                   .detail = KVP_COPIES,
                                   .streams = STREAMS,
                                   .pooled = {(void *const *)streams, (void *const *)(streams + STREAMS)},
                                   .shared = {streams[2 * STREAMS], streams[2 * STREAMS + 1]},
                                   .clock_stream = streams[2 * STREAMS + 2],
                                   .clock_try_ns = 200000,
                                   .ceiling = 30};
    kvp_method_table_default(&methods, &config.copier);
    int why;
    submitter = kvp_submitter_open(&config, &why);
    CHECK(submitter && !why);
    kvp_submitter_hold(submitter); /* the listener's */
    pthread_t callers[THREADS], listens;
    pthread_create(&listens, NULL, listener, NULL);
    for (intptr_t t = 0; t < THREADS; t++) pthread_create(&callers[t], NULL, caller, (void *)t);
    if (!drains()) UNTIL(transfers > 20);
    if (!strcmp(ending, "lose")) OK(kvhostLoseDevice());
    if (!strcmp(ending, "close")) kvp_submitter_close(submitter, 0);
    for (int t = 0; t < THREADS; t++) pthread_join(callers[t], NULL);
    if (!strcmp(ending, "abandon")) {
        kvp_job_status *left = request(KVP_H2D, 0, 0, streams[0], 1);
        kvp_submitter_abandon(submitter);
        CHECK(left->state >= KVP_DONE);
        kvp_job_release(left);
    }
    kvp_submitter_close(submitter, 1);
    pthread_join(listens, NULL);
    kvp_submitter_free(submitter);
    kvp_submitter_stats last;
    kvp_submitter_read(submitter, &last);
    CHECK(!last.pending && (!drains() || (in_place_runs && last.launches[0][KVP_LOOP] + last.launches[0][KVP_BATCH])));
    int destroyed = kvp_submitter_destroy_events(submitter);
    CHECK(!destroyed || !strcmp(ending, "lose"));
    kvp_submitter_free(submitter);
    kvp_ring_close();
    OK(kvhostReset(NULL));
    printf("transfers %llu\n", (unsigned long long)transfers);
    return 0;
}
