// The small arrays of a call as kernels take them: pointers with known extents. The caller gives
// tensors, which array_checks.hpp checks.
#pragma once

#include "kernels/attend_params.hpp"
#include "longspan/element.hpp"
#include "longspan/mask.hpp"
#include "longspan/rope.hpp"
#include "longspan/score_terms.hpp"
#include "longspan/shard.hpp"
#include "longspan/storage.hpp"

namespace longspan {

/// The arrays of one run of a layer, or of one call on one rank. Arrays that are not given are
/// null.
struct RunArrays {
  int batch = 1;
  const std::int32_t* query_start = nullptr;  // [batch + 1]
  const std::int32_t* kv_len = nullptr;       // [batch]
  const std::uint8_t* causal = nullptr;       // [batch]
  Shard keys;                                 // this rank's share of each sequence's keys
  Shard queries;  // its share of the rows, with Options::queries or results by rows; otherwise all
                  // of them
  Documents documents;
  kernels::KeyIndices indices;  // without the rows of the cache
  Ranges ranges;
  const std::int32_t* prefix = nullptr;        // [batch]
  const std::int32_t* left_padding = nullptr;  // [batch]
  const std::int32_t* used_rows = nullptr;     // [batch]
  Floats sinks;                                // [heads]
  Slopes slopes;
  QqBias qq_bias;
  ScaleView q_scale, k_scale, v_scale;
  const float* out_scale = nullptr;            // [1]
  Rope rope;                                   // without `turns`, which the layer has
  const std::int64_t* dropout_seed = nullptr;  // [dropout_seeds], 1 or 2
  int dropout_seeds = 0;
  const std::int32_t* dropout_sequences = nullptr;  // [batch]
};

}  // namespace longspan
