/* Injected by NVTX (NVTX_INJECTION64_PATH): writes the open ranges at each push to NVTX_RECORD. */
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>

static FILE *record;
static __thread const char *open_ranges[64];
static __thread int depth;

static int push(const char *name) {
    open_ranges[depth++ % 64] = name;
    for (int i = 0; i < depth; ++i) {
        fprintf(record, "%s%s", i > 0 ? " > " : "", open_ranges[i]);
    }
    fprintf(record, "\n");
    fflush(record);
    return depth - 1;
}

static int pop(void) { return --depth; }

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
    const NvtxExportTableCallbacks *callbacks = get_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned int size;
    record = fopen(getenv("NVTX_RECORD"), "w");
    if (record == NULL || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) {
        return 0;
    }
    *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
    return 1;
}
