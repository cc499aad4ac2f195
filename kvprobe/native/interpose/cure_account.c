/* See cure_account.h. */
#include "cure_account.h"

#include <string.h>

enum kvp_way kvp_account_way(const kvp_account *a) {
    if (a->state == KVP_LEFT) return KVP_AS_IT_IS;
    if (a->state == KVP_KEPT) return a->since < KVP_LOOK_AGAIN ? KVP_CURED : KVP_AS_IT_IS;
    return a->count[KVP_AS_IT_IS] <= a->count[KVP_CURED] ? KVP_AS_IT_IS : KVP_CURED;
}

int kvp_account_asks(const kvp_account *a, enum kvp_way way) {
    return a->state == KVP_TRYING || way == KVP_AS_IT_IS || a->since == KVP_LOOK_AGAIN - 1;
}

void kvp_account_pass(kvp_account *a) { a->since++; }

void kvp_account_rest(kvp_account *a) {
    uint32_t doublings = a->rests < 16 ? a->rests - 1 : 15;
    if (++a->since < KVP_REST << doublings) return;
    a->since = a->count[0] = a->count[1] = 0;
    a->state = KVP_TRYING;
}

static enum kvp_verdict leave(kvp_account *a, enum kvp_verdict why) {
    a->state = KVP_LEFT;
    a->rests++;
    a->since = 0;
    return why;
}

double kvp_account_cost(const kvp_account *a, enum kvp_way way) {
    uint32_t n = a->count[way] < KVP_SAMPLES ? a->count[way] : KVP_SAMPLES;
    double sorted[KVP_SAMPLES];
    if (!n) return 0;
    memcpy(sorted, a->cost[way], sizeof sorted);
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t k = i; k && sorted[k - 1] > sorted[k]; k--) {
            double larger = sorted[k - 1];
            sorted[k - 1] = sorted[k];
            sorted[k] = larger;
        }
    return sorted[n / 2];
}

double kvp_account_gain(const kvp_account *a) {
    double with = kvp_account_cost(a, KVP_CURED);
    return with > 0 ? kvp_account_cost(a, KVP_AS_IT_IS) / with : 0;
}

enum kvp_verdict kvp_account_add(kvp_account *a, enum kvp_way way, double cost) {
    a->cost[way][a->count[way]++ % KVP_SAMPLES] = cost;
    a->since = way == KVP_CURED ? a->since + 1 : 0;
    if (a->state == KVP_TRYING && a->count[0] >= KVP_SAMPLES && a->count[1] >= KVP_SAMPLES) {
        if (kvp_account_gain(a) < KVP_KEEP_GAIN) return leave(a, KVP_REFUSE);
        a->since = 0;
        a->state = KVP_KEPT;
        return KVP_KEEP;
    }
    if (a->state == KVP_KEPT && way == KVP_AS_IT_IS && kvp_account_gain(a) < KVP_TAKE_BACK_GAIN)
        return leave(a, KVP_TAKE_BACK);
    return KVP_NOTHING_NEW;
}
