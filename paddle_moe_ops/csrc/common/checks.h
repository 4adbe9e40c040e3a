// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Checks of params structs on every backend: sizes, enums, and arrays that must be present and aligned.
#pragma once

#include "common/status.h"
#include "pmo/grouped.h"
#include "pmo/grouped_float8.h"
#include "pmo/grouped_rows.h"
#include "pmo/index_add.h"
#include "pmo/matrices.h"
#include "pmo/paddle_float8.h"
#include "pmo/permute.h"
#include "pmo/quantize.h"
#include "pmo/ranks.h"
#include "pmo/route.h"
#include "pmo/row_id_map.h"
#include "pmo/samples.h"
#include "pmo/topk.h"

namespace pmo {

int check_route_sizes(const pmo_route_params& p);
int check_routing_arrays(const pmo_route_params& p);  // arrays of pmo_route_count_*
int check_route_outputs(const pmo_route_params& p);   // arrays of pmo_route_*
int check_clean_rowmap(const pmo_clean_rowmap_params& p);
int check_make_row_id_map(const pmo_row_id_map_params& p);
int check_read_row_id_map(const pmo_row_id_map_params& p);
int check_slots(const pmo_slots_params& p);
int check_rank_plan(const pmo_rank_plan_params& p);
int check_rank_records(const pmo_rank_records_params& p);
int check_rank_put(const pmo_rank_values_params& p);
int check_rank_take(const pmo_rank_values_params& p);
int check_rank_get(const pmo_rank_values_params& p);
int check_rank_rows(const pmo_rank_rows_params& p);
int check_rank_send(const pmo_rank_send_params& p);
int check_rank_receive(const pmo_rank_receive_params& p);
int check_rank_barrier(const pmo_rank_barrier_params& p);
int check_rank_dispatch(const pmo_rank_dispatch_params& p);
int check_rank_combine(const pmo_rank_combine_params& p);
int check_rank_spoil(const pmo_rank_spoil_params& p);
int check_permute(const pmo_permute_params& p);
int check_route_permute(const pmo_route_params& route, const pmo_permute_params& permute);  // that the two agree
int check_unpermute(const pmo_unpermute_params& p);
int check_unpermute_backward(const pmo_unpermute_backward_params& p);
int check_index_add(const pmo_index_add_params& p);
int check_quantize_sizes(const pmo_quantize_params& p);
int check_quantize(const pmo_quantize_params& p);
int check_dequantize(const pmo_dequantize_params& p);
int check_grouped_product(const pmo_grouped_product_params& p);
int check_grouped_outer(const pmo_grouped_outer_params& p);
int check_grouped_float8(const pmo_grouped_float8_params& p);
int check_quantize_blocks(const pmo_quantize_blocks_params& p);
int check_quantize_columns(const pmo_quantize_columns_params& p);
int check_grouped_outer_float8(const pmo_grouped_outer_float8_params& p);
int check_dequantize_matrices(const pmo_dequantize_matrices_params& p);
int check_samples(const pmo_samples_params& p);
int check_paddle_quantize(const pmo_paddle_quantize_params& p);
int check_paddle_swiglu(const pmo_paddle_swiglu_params& p);
int check_paddle_swiglu_backward(const pmo_paddle_swiglu_backward_params& p);
int check_grouped_tables(const pmo_grouped_tables_params& p);
int check_grouped_clear(const pmo_grouped_clear_params& p);
int check_row_sums(const pmo_row_sums_params& p);
int check_swiglu(const pmo_swiglu_params& p);
int check_swiglu_backward(const pmo_swiglu_backward_params& p);
int check_topk(const pmo_topk_params& p);
int check_topk_backward(const pmo_topk_backward_params& p);

}  // namespace pmo
