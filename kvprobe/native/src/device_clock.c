/* The device's clock, paired with the host's: when events were reached, in the host's time. */
#include "submitter.h"

#define CLOCK_TRIES 8
#define AGAIN_CLOCK_NS UINT64_C(50000000) /* after it could not be read */
#define GOOD_CLOCK_NS 50000               /* the host was not interrupted between asking and hearing */
#define APART 200000                      /* the clocks go apart by one part in so many: 5 us a second */

/* Whether an event on the clock's stream is reached soon. The stream is idle, but may share its hardware channel with
 * one that is held back: nobody waits for that. */
static bool reached_soon(kvp_submitter *s, void *event, uint64_t until) {
    if (!s->threaded) return !CALL(s, event_synchronize, handle_fn)(event); /* virtual time goes on only so */
    int code;
    while ((code = CALL(s, event_query, handle_fn)(event)) == NOT_READY && kvp_now_ns() < until);
    if (code) kvp_clear_error(s);
    return !code;
}

/* Whether a pair that took so long says more than the one in use, which is wrong by half of what it took, and by what
 * the clocks went apart since. The event may have stood behind copies of ours, in the channel that it shares. */
static bool says_more(const kvp_submitter *s, uint64_t took, uint64_t now) {
    return !s->clock_ns || took / 2 < s->clock_took_ns / 2 + (now - s->clock_ns) / APART;
}

/* Pairs the device's clock with the host's: right after an event on an idle stream is reached. Where it is not reached,
 * or only after long, the pair before stays. */
void kvp_renew_device_clock(kvp_submitter *s) {
    uint64_t best = UINT64_MAX;
    int tries = 0;
    for (; tries < CLOCK_TRIES && best > GOOD_CLOCK_NS; tries++) {
        void *event = s->clock_event[1];
        uint64_t before = kvp_now_ns();
        if (!event) return;
        if (CALL(s, event_record, event_stream_fn)(event, s->config.clock_stream)) {
            kvp_clear_error(s);
            break;
        }
        if (!reached_soon(s, event, before + s->config.clock_try_ns)) break;
        uint64_t now = kvp_now_ns(), took = now - before;
        if (!says_more(s, took, now)) continue;
        best = took;
        pthread_mutex_lock(&s->lock);
        s->clock_ns = before + took / 2;
        s->clock_took_ns = took;
        s->clock_event[1] = s->clock_event[0];
        s->clock_event[0] = event;
        atomic_fetch_add(&s->clock_pair, 1);
        pthread_mutex_unlock(&s->lock);
    }
    bool cut_short = tries < CLOCK_TRIES && best > GOOD_CLOCK_NS;
    s->clock_at = kvp_now_ns() - (cut_short ? RENEW_CLOCK_NS - AGAIN_CLOCK_NS : 0);
}

/* Of any thread: a caller that retires its own jobs asks while the submitter's thread may pair the clocks anew. */
uint64_t kvp_device_ns(kvp_submitter *s, void *event) {
    for (;;) {
        float ms = 0;
        pthread_mutex_lock(&s->lock);
        uint64_t clock_ns = s->clock_ns;
        void *at = s->clock_event[0];
        uint32_t pair = atomic_load(&s->clock_pair);
        pthread_mutex_unlock(&s->lock);
        if (!event || !clock_ns) return 0;
        if (CALL(s, event_elapsed, elapsed_fn)(&ms, at, event)) {
            kvp_clear_error(s);
            return 0;
        }
        if (pair == atomic_load(&s->clock_pair)) return clock_ns + (uint64_t)(int64_t)((double)ms * 1e6);
    }
}
