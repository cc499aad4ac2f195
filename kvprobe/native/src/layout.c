/* How large the structures are that Python shares with this library: one of other sources is told by them. */
#include "kvp.h"
#include "kvp_choose.h"
#include "kvp_copy.h"
#include "kvp_engine.h"
#include "kvp_submitter.h"
#include "pinned_pool.h"

uint32_t kvp_layout(uint32_t *sizes, uint32_t room) {
    static const uint32_t all[] = {sizeof(kvp_record),
                                   sizeof(kvp_ring_options),
                                   sizeof(kvp_submit_options),
                                   sizeof(kvp_submit_result),
                                   sizeof(kvp_calibrate_calls),
                                   sizeof(kvp_calibration),
                                   sizeof(kvp_cuda_calls),
                                   sizeof(kvp_copy_kernel),
                                   sizeof(kvp_copy_list),
                                   sizeof(kvp_copier),
                                   sizeof(kvp_method_row),
                                   sizeof(kvp_method_table),
                                   sizeof(kvp_job_status),
                                   sizeof(kvp_job_refused),
                                   sizeof(kvp_request),
                                   sizeof(kvp_addresses),
                                   sizeof(kvp_side),
                                   sizeof(kvp_submitter_config),
                                   sizeof(kvp_submitter_stats),
                                   sizeof(kvp_memory),
                                   sizeof(kvp_pinned_options),
                                   sizeof(kvp_pinned_counts)};
    uint32_t count = sizeof all / sizeof *all;
    for (uint32_t i = 0; i < count && i < room; i++) sizes[i] = all[i];
    return count;
}
