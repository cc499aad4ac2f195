/* NVTX ranges around single copies, from C: pushing one from Python costs a third of the copy it marks. */
#include "kvp_engine.h"

#ifdef KVP_HAVE_NVTX
#include <nvtx3/nvToolsExt.h>
#include <stdatomic.h>
#include <stdio.h>

static nvtxDomainHandle_t domain(void) {
    static _Atomic(nvtxDomainHandle_t) made;
    nvtxDomainHandle_t d = atomic_load(&made);
    if (!d) {
        d = nvtxDomainCreateA("kvprobe"); /* NULL while no tool is attached; a second create of a race is harmless */
        atomic_store(&made, d);
    }
    return d;
}

static nvtxEventAttributes_t described(const char *text, uint64_t bytes) {
    nvtxEventAttributes_t a = {0};
    a.version = NVTX_VERSION;
    a.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    a.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    a.payload.ullValue = bytes;
    a.messageType = NVTX_MESSAGE_TYPE_ASCII;
    a.message.ascii = text;
    return a;
}

int kvp_nvtx_listening(void) { return domain() != NULL; }

void kvp_nvtx_push(uint64_t bytes, uint32_t direction, uint64_t stream, uint32_t transfer) {
    static const char *const names[] = {"copy", "H2D", "D2H", "D2D", "H2H"};
    char text[80];
    snprintf(text, sizeof text, "%s stream %#llx transfer %u", names[direction < 5 ? direction : 0],
             (unsigned long long)stream, transfer);
    nvtxEventAttributes_t a = described(text, bytes);
    nvtxDomainRangePushEx(domain(), &a);
}

void kvp_nvtx_pop(void) { nvtxDomainRangePop(domain()); }

void *kvp_nvtx_range_start(int store, uint32_t transfer, uint64_t stream, uint64_t bytes) {
    if (!domain()) return NULL;
    char text[80];
    snprintf(text, sizeof text, "%s %u stream %#llx", store ? "store" : "load", transfer, (unsigned long long)stream);
    nvtxEventAttributes_t a = described(text, bytes);
    return (void *)(uintptr_t)nvtxDomainRangeStartEx(domain(), &a);
}

void kvp_nvtx_range_end(void *range) { nvtxDomainRangeEnd(domain(), (nvtxRangeId_t)(uintptr_t)range); }
#else
int kvp_nvtx_listening(void) { return 0; }
void kvp_nvtx_push(uint64_t bytes, uint32_t direction, uint64_t stream, uint32_t transfer) {
    (void)bytes, (void)direction, (void)stream, (void)transfer;
}
void kvp_nvtx_pop(void) {}
void *kvp_nvtx_range_start(int store, uint32_t transfer, uint64_t stream, uint64_t bytes) {
    (void)store, (void)transfer, (void)stream, (void)bytes;
    return NULL;
}
void kvp_nvtx_range_end(void *range) { (void)range; }
#endif
