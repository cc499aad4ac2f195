/* The runtime's life: configuration, first use, reset, fork; and how every call begins and ends. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "rt.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

_Atomic(runtime *) kvh_current;

static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER;
static runtime *graveyard; /* former runtimes: a call that was just leaving one still unlocks in it */
static op *spare_ops;      /* theirs */
static marker *spare_markers;

static __thread struct {
    cudaError_t last_error;
    uint32_t tid;
    uint64_t correlation;
} self __attribute__((tls_model("initial-exec")));

/* ---- configuration ------------------------------------------------------------------------------------------------
 */

static double env_number(const char *name, double low, double high, double otherwise) {
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    char *end;
    double value = strtod(text, &end);
    while (*end == ' ') end++;
    return *end || !(value >= low && value <= high) ? otherwise : value;
}

static double queue_scale(void) {
    static const struct {
        const char *text;
        double scale;
    } known[] = {{"0.25x", 0.25}, {"0.5x", 0.5}, {"1x", 1}, {"2x", 2}, {"4x", 4}};
    const char *text = getenv("CUDA_SCALE_LAUNCH_QUEUES");
    for (size_t i = 0; text && i < sizeof known / sizeof *known; i++)
        if (!strcmp(text, known[i].text)) return known[i].scale;
    return 1;
}

static uint64_t pick(uint64_t given, uint64_t low, uint64_t high, double otherwise) {
    return given >= low && given <= high ? given : (uint64_t)otherwise;
}

/* Fills what is 0. The scale acts on 1,024 entries of which 3 are not for us: 1,021, 4,093, 253 were measured. */
static kvhost_config resolve(const kvhost_config *given) {
    kvhost_config c = given ? *given : (kvhost_config){0};
    double depth = (env_number("KVHOST_DEPTH", 1, 1e6, 1021) + 3) * queue_scale() - 3;
    double channels =
        env_number("CUDA_DEVICE_MAX_CONNECTIONS", 1, MAX_CHANNELS, env_number("KVHOST_CHANNELS", 1, MAX_CHANNELS, 4));
    double copies = env_number("CUDA_DEVICE_MAX_COPY_CONNECTIONS", 1, MAX_CHANNELS, channels);
    c.depth = pick(c.depth, 1, 1000000, depth < 1 ? 1 : depth);
    c.compute_channels = pick(c.compute_channels, 1, MAX_CHANNELS, channels);
    c.copy_channels = pick(c.copy_channels, 1, MAX_CHANNELS, copies);
    if (!(c.h2d_bytes_per_s > 0)) c.h2d_bytes_per_s = env_number("KVHOST_H2D_GBPS", 1e-6, 1e6, 4) * 1e9;
    if (!(c.d2h_bytes_per_s > 0)) c.d2h_bytes_per_s = env_number("KVHOST_D2H_GBPS", 1e-6, 1e6, 4) * 1e9;
    if (!(c.pageable_bytes_per_s > 0)) c.pageable_bytes_per_s = env_number("KVHOST_PAGEABLE_GBPS", 1e-6, 1e6, 0) * 1e9;
    if (c.submit_ns == 0) c.submit_ns = env_number("KVHOST_SUBMIT_NS", 0, 1e9, 1000);
    if (c.latency_ns == 0) c.latency_ns = env_number("KVHOST_LATENCY_US", 0, 1e6, 2) * 1e3;
    if (!c.memory_bytes) c.memory_bytes = (uint64_t)env_number("KVHOST_MEMORY_BYTES", 1, 1e15, 8589934592.0);
    if (!c.pinned_bytes) c.pinned_bytes = (uint64_t)env_number("KVHOST_PINNED_BYTES", 1, 1e15, 0);
    const char *clock = getenv("KVHOST_CLOCK");
    if (!c.virtual_clock) c.virtual_clock = clock && !strcmp(clock, "virtual") ? 1 : 2;
    if (!c.seed) c.seed = (uint64_t)env_number("KVHOST_SEED", 1, 9e15, 1);
    if (!c.runtime_version) c.runtime_version = (uint64_t)env_number("KVHOST_RUNTIME_VERSION", 11000, 99000, 13000);
    return c;
}

static void apply(runtime *rt, const kvhost_config *given) {
    rt->config = resolve(given);
    uint64_t depth = rt->config.depth;
    rt->slack = (uint32_t)(depth / 8 < 21 ? depth / 8 : 21);
    rt->room = (uint32_t)depth - rt->slack;
    rt->channels_of[KVHOST_COMPUTE] = (uint32_t)rt->config.compute_channels;
    rt->channels_of[KVHOST_H2D] = rt->channels_of[KVHOST_D2H] = (uint32_t)rt->config.copy_channels;
    for (int k = 0; k < CLASSES; k++) rt->stats.capacity[k] = (uint64_t)rt->channels_of[k] * rt->room + rt->slack;
}

/* ---- life ---------------------------------------------------------------------------------------------------------
 */

/* In a child the parent's threads are gone and its locks may never be given back: none of it is touched again. */
static void in_child(void) {
    atomic_store(&kvh_current, NULL);
    pthread_mutex_init(&start_lock, NULL);
    self.tid = 0;
    spare_ops = NULL; /* a fork may have caught them half-way */
    spare_markers = NULL;
    kvh_handles_in_child();
    kvh_trace_in_child();
    kvh_faults_in_child();
    kvh_memory_in_child();
}

static void once_per_process(void) {
    pthread_atfork(NULL, NULL, in_child);
    /* Engine threads run this library's code until the process ends: it must not be unloaded under them. */
    Dl_info info;
    if (dladdr((void *)(uintptr_t)once_per_process, &info) && info.dli_fname)
        dlopen(info.dli_fname, RTLD_NOW | RTLD_NODELETE | RTLD_NOLOAD);
}

static runtime *create(const kvhost_config *config) {
    static uint64_t contexts;
    runtime *rt = calloc(1, sizeof *rt);
    if (!rt) abort();
    rt->context_id = ++contexts;
    pthread_mutexattr_t adaptive;
    pthread_mutexattr_init(&adaptive);
    pthread_mutexattr_settype(&adaptive, PTHREAD_MUTEX_ADAPTIVE_NP);
    pthread_mutex_init(&rt->lock, &adaptive);
    pthread_mutexattr_destroy(&adaptive);
    for (uint8_t k = 0; k < CLASSES; k++)
        for (uint8_t i = 0; i < MAX_CHANNELS; i++) rt->channels[k][i].class = k, rt->channels[k][i].index = i;
    apply(rt, config);
    rt->free_ops = spare_ops;
    rt->free_markers = spare_markers;
    spare_ops = NULL;
    spare_markers = NULL;
    rt->memory = kvh_memory_new(&rt->config);
    rt->devices = (int)env_number("KVHOST_DEVICES", 1, MAX_DEVICES, 1);
    int was = kvh_device;
    for (kvh_device = 0; kvh_device < rt->devices; kvh_device++) {
        stream *zero = rt->zero[kvh_device] = kvh_stream_new(rt, 0);
        if (!rt->memory || !zero) abort();
        zero->is_default = true;
    }
    kvh_device = was;
    if (!rt->free_ops && !(kvh_more_ops(rt) && kvh_more_ops(rt))) abort();
    rt->time = rt->config.virtual_clock == 1 ? &kvh_simulated : &kvh_realtime;
    rt->time->start(rt);
    return rt;
}

runtime *kvh_start(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, once_per_process);
    pthread_mutex_lock(&start_lock);
    runtime *rt = atomic_load(&kvh_current);
    if (!rt) {
        rt = create(NULL);
        atomic_store_explicit(&kvh_current, rt, memory_order_release);
    }
    pthread_mutex_unlock(&start_lock);
    return rt;
}

static void destroy(runtime *rt) {
    parker p = {0};
    atomic_store(&rt->closed, true);
    kvh_lock(rt);
    kvh_fail(rt, cudaErrorDevicesUnavailable);
    rt->leaving = &p;
    kvh_let_leave(rt);
    kvh_unlock(rt);
    rt->time->wait(rt, &p);
    while (atomic_load(&rt->calls)) usleep(50); /* one that has begun would find what is freed now */
    rt->time->stop(rt);
    free(rt->compute.heap);
    kvh_release_handles(rt);
    kvh_memory_free(rt->memory);
    rt->memory = NULL;
    spare_ops = rt->free_ops; /* nothing is pending: all are here */
    spare_markers = rt->free_markers;
    rt->graveyard = graveyard;
    graveyard = rt;
}

cudaError_t kvhostReset(const kvhost_config *config) {
    kvh_start();
    pthread_mutex_lock(&start_lock);
    runtime *old = atomic_load(&kvh_current);
    bool owns = old->simulation && kvh_simulation_enter(old);
    if (old->simulation && kvh_simulation_busy(old)) { /* an actor, or a function that a stream calls */
        if (owns) kvh_simulation_leave(old);
        pthread_mutex_unlock(&start_lock);
        return cudaErrorNotSupported;
    }
    kvh_faults_clear();
    kvh_trace_forget();
    destroy(old);
    atomic_store(&kvh_current, create(config));
    if (owns) kvh_simulation_leave(old);
    pthread_mutex_unlock(&start_lock);
    self.last_error = cudaSuccess;
    return cudaSuccess;
}

/* What kvhostReset does, once all work is done; the configuration stays. */
KVP_EXPORT cudaError_t cudaDeviceReset(void) {
    KVH_ENTER(cudaDeviceReset, 0);
    cudaError_t error = kvh_wait_all(c);
    kvhost_config config = c->rt->config;
    kvh_end(c, error);
    return error ? error : kvhostReset(&config);
}

cudaError_t kvhostConfigure(const kvhost_config *config) {
    runtime *rt = kvh_runtime();
    kvh_lock(rt);
    bool used = rt->used;
    kvh_unlock(rt);
    return used ? cudaErrorNotSupported : kvhostReset(config);
}

cudaError_t kvhostGetConfig(kvhost_config *config) {
    if (!config) return cudaErrorInvalidValue;
    runtime *rt = kvh_runtime();
    kvh_lock(rt);
    *config = rt->config;
    kvh_unlock(rt);
    return cudaSuccess;
}

cudaError_t kvhostLoseDevice(void) {
    runtime *rt = kvh_runtime();
    kvh_lock(rt);
    kvh_fail(rt, cudaErrorDevicesUnavailable);
    kvh_unlock(rt);
    return cudaSuccess;
}

cudaError_t kvhostStats(kvhost_stats *stats) {
    if (!stats) return cudaErrorInvalidValue;
    runtime *rt = kvh_runtime();
    kvh_lock(rt);
    *stats = rt->stats;
    for (int k = 0; k < CLASSES; k++)
        for (int i = 0; i < MAX_CHANNELS; i++) {
            stats->outstanding[k][i] = rt->channels[k][i].outstanding;
            stats->waiting[k][i] = rt->channels[k][i].waiting;
        }
    stats->sticky = (uint64_t)atomic_load(&rt->sticky);
    kvh_unlock(rt);
    kvh_memory_stats(rt, stats);
    return cudaSuccess;
}

/* ---- every call ----------------------------------------------------------------------------------------------------
 */

uint32_t kvh_tid(void) {
    if (!self.tid) self.tid = (uint32_t)syscall(SYS_gettid);
    return self.tid;
}

cudaError_t kvh_begin(call *c, enum kvh_api api, uint64_t stream_handle) {
    runtime *rt = kvh_runtime();
    c->rt = rt;
    c->api = api;
    c->reason = KVHOST_NOT_BLOCKED;
    c->blocked_ns = c->longest_ns = c->queue_ns = c->correlation = c->trace_index = 0;
    c->chunks = 0;
    c->owns = rt->simulation && kvh_simulation_enter(rt);
    c->counted = !rt->simulation;
    if (c->counted) atomic_fetch_add(&rt->calls, 1);
    c->tracing = atomic_load_explicit(&rt->tracing, memory_order_relaxed);
    if (c->tracing) kvh_trace_begin(c, stream_handle);
    cudaError_t error = atomic_load(&rt->closed) ? cudaErrorDevicesUnavailable : cudaSuccess;
    if (!error && atomic_load_explicit(&rt->faults, memory_order_relaxed)) error = kvh_fault(api);
    if (!error) error = atomic_load_explicit(&rt->sticky, memory_order_relaxed);
    if (!error && atomic_load_explicit(&rt->captures, memory_order_relaxed)) error = kvh_capture_forbids(rt, api);
    return error;
}

cudaError_t kvh_end(call *c, cudaError_t error) {
    if (c->correlation) self.correlation = c->correlation;
    if (c->tracing) kvh_trace_end(c, error);
    if (__builtin_expect(error != 0, 0) &&
        kvhostCallName(c->api)[2] == 'd') /* cuda..., not cu...: the driver has none */
        kvh_set_last_error(error);
    if (c->owns) kvh_simulation_leave(c->rt);
    if (c->counted) atomic_fetch_sub(&c->rt->calls, 1);
    return error;
}

void kvh_blocked(call *c, enum kvhost_reason reason, uint64_t since_ns) {
    uint64_t now = kvh_now(c->rt), ns = now > since_ns ? now - since_ns : 0;
    c->blocked_ns += ns;
    if (reason == KVHOST_QUEUE_FULL) c->queue_ns += ns;
    if (c->reason && ns < c->longest_ns) return;
    c->longest_ns = ns;
    c->reason = reason;
}

/* "Not ready" is an answer, not an error, but CUDA too remembers it as the last error. */
void kvh_set_last_error(cudaError_t error) { self.last_error = error; }

thread_state kvh_swap_thread(thread_state of) {
    thread_state was = {self.last_error, self.correlation};
    self.last_error = of.last_error;
    self.correlation = of.correlation;
    return was;
}

KVP_EXPORT cudaError_t cudaPeekAtLastError(void) {
    runtime *rt = kvh_runtime();
    int sticky = atomic_load(&rt->sticky);
    return sticky ? sticky : self.last_error;
}

KVP_EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = cudaPeekAtLastError();
    self.last_error = cudaSuccess;
    return error;
}

uint64_t kvhostLastCorrelation(void) { return self.correlation; }
