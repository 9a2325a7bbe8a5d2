// The small arrays of a call as kernels take them: pointers whose extents are known. The caller
// gives them as tensors, and array_checks.hpp checks them.
#pragma once

#include "longspan/element.hpp"
#include "longspan/mask.hpp"
#include "longspan/score.hpp"
#include "longspan/shard.hpp"

namespace longspan {

/// The arrays of one run of a layer, or of one call on one rank. What is not given is null.
struct RunArrays {
  int batch = 1;
  const std::int32_t* query_start = nullptr;  // [batch + 1]
  const std::int32_t* kv_len = nullptr;       // [batch]
  const std::uint8_t* causal = nullptr;       // [batch]
  Shard keys;                                 // this rank's share of each sequence's keys
  Shard queries;  // and of its rows, with Options::queries or results by rows; else all of them
  Documents documents;
  Floats sinks;  // [heads]
  Slopes slopes;
  QqBias qq_bias;
  Scales q_scale, k_scale, v_scale;
  const float* out_scale = nullptr;  // [1]
};

}  // namespace longspan
