/* NVTX ranges around watched calls, in the domain `kvprobe`, payload the bytes; only while a tool listens. */
#include "interpose.h"

#include <stdlib.h>

#ifdef KVP_HAVE_NVTX
#include <nvtx3/nvToolsExt.h>

static nvtxDomainHandle_t domain;

/* At the first recorded call, not before main: the tool's own library is loaded here. */
void kvp_nvtx_start(void) {
    const char *asked = getenv("KVPROBE_NVTX");
    if (kvp_watch.nvtx || says_no(asked) || !getenv("NVTX_INJECTION64_PATH")) return;
    domain = nvtxDomainCreateA("kvprobe");
    kvp_watch.nvtx = domain != NULL;
}

static const char *call_name(unsigned call) {
    static const char *const names[] = {
#define X(id, kind, name) [id] = #name,
        KVP_CALLS(X)
#undef X
    };
    return call < sizeof names / sizeof *names && names[call] ? names[call] : "call";
}

void kvp_nvtx_range_push(const kvp_record *r) {
    nvtxEventAttributes_t a = {0};
    a.version = NVTX_VERSION;
    a.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    a.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    a.payload.ullValue = r->bytes;
    a.messageType = NVTX_MESSAGE_TYPE_ASCII;
    a.message.ascii = call_name(r->call);
    nvtxDomainRangePushEx(domain, &a);
}

void kvp_nvtx_range_pop(void) { nvtxDomainRangePop(domain); }
#else
void kvp_nvtx_start(void) {}
void kvp_nvtx_range_push(const kvp_record *r) { (void)r; }
void kvp_nvtx_range_pop(void) {}
#endif
