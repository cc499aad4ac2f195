/* The smallest NVTX tool: prints a line for each range pushed into the domain `kvprobe` to the file $NVTX_SEEN. */
#include <nvtx3/nvToolsExt.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE *out;
static int depth;

static nvtxDomainHandle_t create(const char *name) { return (nvtxDomainHandle_t)strdup(name); }
static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *a) {
    if (!strcmp((const char *)domain, "kvprobe"))
        fprintf(out, "%s %llu\n", a->message.ascii, (unsigned long long)a->payload.ullValue);
    return depth++;
}
static int pop(nvtxDomainHandle_t domain) {
    (void)domain;
    if (!--depth) fprintf(out, "pop\n"), fflush(out);
    return depth;
}

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
    const NvtxExportTableCallbacks *callbacks = get_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned size;
    out = fopen(getenv("NVTX_SEEN"), "a");
    if (!out || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create;
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
    return 1;
}
