/* Errors on demand: the n-th call, the n-th copy, the n-th execution. */
#include "rt.h"

#include <string.h>

#define MAX_FAULTS 16

static pthread_mutex_t fault_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uint16_t api; /* 0: free */
    uint64_t left;
    cudaError_t code;
} faults[MAX_FAULTS];
static uint64_t copy_left, execution_left;
static cudaError_t copy_code, execution_code;
static uint64_t failed[API_COUNT], copies_failed, executions_failed;

static void forget(void) {
    memset(faults, 0, sizeof faults);
    copy_left = execution_left = 0;
    memset(failed, 0, sizeof failed);
    copies_failed = executions_failed = 0;
}

void kvh_faults_clear(void) {
    pthread_mutex_lock(&fault_lock);
    forget();
    pthread_mutex_unlock(&fault_lock);
}

void kvh_faults_in_child(void) {
    pthread_mutex_init(&fault_lock, NULL);
    forget();
}

cudaError_t kvh_fault(enum kvh_api api) {
    cudaError_t code = cudaSuccess;
    pthread_mutex_lock(&fault_lock);
    for (int i = 0; i < MAX_FAULTS; i++)
        if (faults[i].api == api && --faults[i].left == 0) {
            faults[i].api = 0;
            if (!code) code = faults[i].code;
        }
    failed[api] += code != 0;
    pthread_mutex_unlock(&fault_lock);
    return code;
}

cudaError_t kvh_fault_copy(int *execution) {
    runtime *rt = kvh_runtime();
    if (!atomic_load_explicit(&rt->faults, memory_order_relaxed)) return cudaSuccess;
    cudaError_t code = cudaSuccess;
    pthread_mutex_lock(&fault_lock);
    if (copy_left && --copy_left == 0) {
        code = copy_code;
        copies_failed++;
    }
    if (!code && execution_left && --execution_left == 0) {
        *execution = execution_code;
        executions_failed++;
    }
    pthread_mutex_unlock(&fault_lock);
    return code;
}

cudaError_t kvhostFailCopy(uint64_t n, cudaError_t code) {
    pthread_mutex_lock(&fault_lock);
    copy_left = n;
    copy_code = code;
    pthread_mutex_unlock(&fault_lock);
    atomic_store(&kvh_runtime()->faults, true);
    return cudaSuccess;
}

cudaError_t kvhostFailExecution(uint64_t n, cudaError_t code) {
    if (!code) return cudaErrorInvalidValue;
    pthread_mutex_lock(&fault_lock);
    execution_left = n;
    execution_code = code;
    pthread_mutex_unlock(&fault_lock);
    atomic_store(&kvh_runtime()->faults, true);
    return cudaSuccess;
}

static uint16_t api_of(const char *name) {
    uint16_t api = 1;
    while (api < API_COUNT && (!name || strcmp(name, kvhostCallName(api)))) api++;
    return api;
}

uint64_t kvhostFailed(const char *name) {
    if (name && !strcmp(name, "copy")) return copies_failed;
    if (name && !strcmp(name, "execution")) return executions_failed;
    uint16_t api = api_of(name);
    return api < API_COUNT ? failed[api] : 0;
}

cudaError_t kvhostFailCall(const char *name, uint64_t n, cudaError_t code) {
    uint16_t api = api_of(name);
    if (api == API_COUNT) return cudaErrorInvalidValue;
    cudaError_t error = n ? cudaErrorInvalidValue : cudaSuccess;
    pthread_mutex_lock(&fault_lock);
    for (int i = 0; i < MAX_FAULTS && !n; i++)
        if (faults[i].api == api) faults[i].api = 0;
    for (int i = 0; i < MAX_FAULTS && error; i++)
        if (!faults[i].api) {
            faults[i].api = api;
            faults[i].left = n;
            faults[i].code = code;
            error = cudaSuccess;
        }
    pthread_mutex_unlock(&fault_lock);
    atomic_store(&kvh_runtime()->faults, true);
    return error;
}
