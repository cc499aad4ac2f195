/* Whether a cure pays for one kind of call: what calls cost with it and without it, side by side. Pure: no clock, no
 * lock, no CUDA. The caller holds whatever protects an account. */
#ifndef KVP_CURE_ACCOUNT_H
#define KVP_CURE_ACCOUNT_H

#include <stdint.h>

#define KVP_SAMPLES 5          /* the newest of each way; compared are their medians */
#define KVP_KEEP_GAIN 1.25     /* a call must get so much shorter for the cure to be kept */
#define KVP_TAKE_BACK_GAIN 1.1 /* and stay so */
#define KVP_LOOK_AGAIN 64      /* after so many calls with the cure one goes without it: to see whether it still pays */

#define KVP_REST 1024u /* calls of a kind whose cure did not pay until it is tried again; doubled each time */

enum kvp_way { KVP_AS_IT_IS, KVP_CURED };
enum kvp_trial { KVP_TRYING, KVP_KEPT, KVP_LEFT };
enum kvp_verdict { KVP_NOTHING_NEW, KVP_KEEP, KVP_REFUSE, KVP_TAKE_BACK };

typedef struct {
    volatile uint8_t state; /* enum kvp_trial */
    uint32_t since;         /* calls with the cure since the last one without it; where it was left: calls since */
    uint32_t rests;         /* how often it was left */
    uint32_t count[2];      /* samples ever, by enum kvp_way */
    double cost[2][KVP_SAMPLES];
} kvp_account;

/* How the next call is to go. While it is tried the two ways take turns: both meet the same weather. */
enum kvp_way kvp_account_way(const kvp_account *a);
/* Whether what that call costs is to be found out: of a kept cure, it is for one call in KVP_LOOK_AGAIN. */
int kvp_account_asks(const kvp_account *a, enum kvp_way way);
/* A call with the cure of which the cost was not asked for. */
void kvp_account_pass(kvp_account *a);
/* A call of a kind whose cure was left. */
void kvp_account_rest(kvp_account *a);
/* Adds what a call cost (in any unit, the same for all of an account), and says what follows from it. */
enum kvp_verdict kvp_account_add(kvp_account *a, enum kvp_way way, double cost);
/* Median of the newest samples; 0: there is none. */
double kvp_account_cost(const kvp_account *a, enum kvp_way way);
/* How many times as much a call costs without the cure; 0: not known. */
double kvp_account_gain(const kvp_account *a);

#endif
