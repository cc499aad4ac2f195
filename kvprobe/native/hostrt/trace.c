/* The ground truth: what every call did, on the host's side and on the engines'. */
#include "rt.h"

#include <stdlib.h>
#include <string.h>

static pthread_mutex_t trace_lock = PTHREAD_MUTEX_INITIALIZER;
static kvhost_trace_record *records;
static uint64_t capacity, used, dropped;
static uint32_t epoch; /* of the buffer: an operation of an earlier one finds that its record is gone */

_Static_assert(sizeof(kvhost_trace_record) == 136, "kvhost.h says 136");

static const struct {
    const char *name;
    uint8_t call;
} apis[] = {
#define X(name, call) {#name, call},
    KVH_APIS(X)
#undef X
};

const char *kvhostCallName(uint16_t api) { return api && api < API_COUNT ? apis[api].name : "?"; }

static kvhost_trace_record *at(uint64_t index, uint32_t of_epoch) {
    return index && of_epoch == epoch && index <= used ? &records[index - 1] : NULL;
}

static bool is_query(uint16_t api) {
    return api == API_cudaEventQuery || api == API_cudaStreamQuery || api == API_cuEventQuery ||
           api == API_cuStreamQuery;
}

void kvh_trace_begin(call *c, uint64_t stream_handle) {
    if (is_query(c->api)) {
        c->tracing = false;
        return;
    }
    uint64_t now = kvh_now(c->rt);
    pthread_mutex_lock(&trace_lock);
    if (used < capacity) {
        kvhost_trace_record *r = &records[used++];
        *r = (kvhost_trace_record){.sequence = used - 1,
                                   .start_ns = now,
                                   .stream = stream_handle,
                                   .tid = c->rt->simulation ? kvh_simulated_thread(c->rt) : kvh_tid(),
                                   .api = c->api,
                                   .call = apis[c->api].call,
                                   .op_class = KVHOST_NO_CLASS};
        c->trace_index = used;
        c->trace_epoch = epoch;
    } else {
        dropped++;
        c->tracing = false;
    }
    pthread_mutex_unlock(&trace_lock);
}

void kvh_trace_about(call *c, const void *dst, const void *src, uint64_t bytes, uint32_t count, uint8_t direction,
                     uint8_t memory) {
    if (!c->tracing) return;
    pthread_mutex_lock(&trace_lock);
    kvhost_trace_record *r = at(c->trace_index, c->trace_epoch);
    if (r) {
        r->dst = (uintptr_t)dst;
        r->src = (uintptr_t)src;
        r->bytes = bytes;
        r->count = count;
        r->direction = direction;
        r->memory = memory;
    }
    pthread_mutex_unlock(&trace_lock);
}

void kvh_trace_submitted(call *c, const stream *s, const channel *ch) {
    pthread_mutex_lock(&trace_lock);
    kvhost_trace_record *r = at(c->trace_index, c->trace_epoch);
    if (r) {
        r->correlation = c->correlation;
        r->chunks = c->chunks;
        r->op_class = ch->class;
        r->channel = ch->index;
        r->outstanding = ch->outstanding;
        r->stream_number = s->number;
    }
    pthread_mutex_unlock(&trace_lock);
}

void kvh_trace_executed(const op *o, bool lost) {
    pthread_mutex_lock(&trace_lock);
    kvhost_trace_record *r = at(o->trace_index, o->trace_epoch);
    if (r) {
        if (!r->exec_start_ns || o->start_ns < r->exec_start_ns) r->exec_start_ns = o->start_ns;
        if (o->finish_ns > r->exec_end_ns) r->exec_end_ns = o->finish_ns;
        r->executed++;
        if (lost) r->dropped = 1;
    }
    pthread_mutex_unlock(&trace_lock);
}

void kvh_trace_end(call *c, cudaError_t error) {
    pthread_mutex_lock(&trace_lock);
    kvhost_trace_record *r = at(c->trace_index, c->trace_epoch);
    if (r) {
        r->end_ns = kvh_now(c->rt);
        r->blocked_ns = c->blocked_ns;
        r->queue_ns = c->queue_ns;
        r->reason = c->reason;
        r->result = (uint16_t)error;
    }
    pthread_mutex_unlock(&trace_lock);
}

static void forget(void) {
    free(records);
    records = NULL;
    capacity = used = dropped = 0;
    epoch++;
}

void kvh_trace_forget(void) {
    pthread_mutex_lock(&trace_lock);
    forget();
    pthread_mutex_unlock(&trace_lock);
}

void kvh_trace_in_child(void) {
    pthread_mutex_init(&trace_lock, NULL);
    forget();
}

cudaError_t kvhostTraceStart(uint64_t wanted) {
    runtime *rt = kvh_runtime();
    if (!wanted || wanted > UINT64_MAX / sizeof *records) return cudaErrorInvalidValue;
    kvhost_trace_record *fresh = malloc(wanted * sizeof *fresh);
    if (!fresh) return cudaErrorMemoryAllocation;
    memset(fresh, 0xff, wanted * sizeof *fresh); /* touched now: no page fault in every 30th traced call */
    pthread_mutex_lock(&trace_lock);
    forget();
    records = fresh;
    capacity = wanted;
    pthread_mutex_unlock(&trace_lock);
    atomic_store(&rt->tracing, true);
    return cudaSuccess;
}

cudaError_t kvhostTraceStop(void) {
    atomic_store(&kvh_runtime()->tracing, false);
    return cudaSuccess;
}

uint64_t kvhostTraceRead(kvhost_trace_record *out, uint64_t first, uint64_t max) {
    pthread_mutex_lock(&trace_lock);
    uint64_t n = used;
    if (out) {
        n = first < used ? used - first : 0;
        if (n > max) n = max;
        memcpy(out, records + first, n * sizeof *out);
    }
    pthread_mutex_unlock(&trace_lock);
    return n;
}

uint64_t kvhostTraceDropped(void) {
    pthread_mutex_lock(&trace_lock);
    uint64_t n = dropped;
    pthread_mutex_unlock(&trace_lock);
    return n;
}
