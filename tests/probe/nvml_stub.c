/* A libnvidia-ml.so.1 with two devices, for machines without a driver: the second has fewer lanes than it could. */
#include <stdio.h>
#include <string.h>
#include <stdint.h>
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned gpu, mem; } busy;
static int two[2] = {0, 1};
static int number(void *d) { return *(int *)d; }
int nvmlInitWithFlags(unsigned f) { (void)f; return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int e) { (void)e; return "Not Supported"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = &two[i]; return 0; }
int nvmlDeviceGetName(void *d, char *t, unsigned n) { snprintf(t, n, "Stub %d", number(d)); return 0; }
int nvmlSystemGetDriverVersion(char *t, unsigned n) { snprintf(t, n, "580.0"); return 0; }
int nvmlDeviceGetMemoryInfo(void *d, memory *m) { (void)d; m->total = 1000; m->used = 250; m->free = 750; return 0; }
int nvmlDeviceGetUtilizationRates(void *d, busy *b) { b->gpu = number(d) ? 80 : 0; b->mem = 5; return 0; }
int nvmlDeviceGetPowerUsage(void *d, unsigned *w) { (void)d; *w = 123456; return 0; }
int nvmlDeviceGetCurrPcieLinkGeneration(void *d, unsigned *v) { (void)d; *v = 1; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *d, unsigned *v) { (void)d; *v = 5; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(void *d, unsigned *v) { *v = number(d) ? 8 : 16; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *d, unsigned *v) { (void)d; *v = 16; return 0; }
int nvmlDeviceGetPcieThroughput(void *d, unsigned c, unsigned *v) { (void)d; *v = c ? 2000 : 1000; return 0; }
int nvmlDeviceGetClockInfo(void *d, int c, unsigned *v) { (void)d; *v = c == 1 ? 1980 : 2619; return 0; }
int nvmlDeviceGetTemperature(void *d, int s, unsigned *v) { (void)d, (void)s; *v = 41; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(void *d, unsigned long long *v) { *v = number(d) ? 0x44 : 0x1; return 0; }
