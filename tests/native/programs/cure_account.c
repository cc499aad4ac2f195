/* Reads costs of calls without and with a cure, a pair a line, and writes for each call which way it went and what
 * followed: a lower-case letter for the way (a: as it is, c: cured, r: at rest), then what was concluded. */
#include "../../../kvprobe/native/interpose/cure_account.c"

#include <stdio.h>

int main(void) {
    kvp_account account = {0};
    double cost[2];
    while (scanf("%lf %lf", &cost[KVP_AS_IT_IS], &cost[KVP_CURED]) == 2) {
        if (account.state == KVP_LEFT) {
            kvp_account_rest(&account);
            printf("r\n");
            continue;
        }
        enum kvp_way way = kvp_account_way(&account);
        static const char *const said[] = {"", " keep", " refuse", " rollback"};
        enum kvp_verdict verdict = KVP_NOTHING_NEW;
        if (kvp_account_asks(&account, way))
            verdict = kvp_account_add(&account, way, cost[way]);
        else
            kvp_account_pass(&account);
        printf("%c%s\n", way == KVP_CURED ? 'c' : 'a', said[verdict]);
    }
    return 0;
}
