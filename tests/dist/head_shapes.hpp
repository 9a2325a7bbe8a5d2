// The problems of strategies that share the work by heads.
#pragma once

#include <vector>

#include "tests/dist/layer_run.hpp"

namespace longspan::tests {

/// With at least as many heads as ranks: with kv heads for each, too few of them, and numbers that
/// no number of ranks divides.
inline std::vector<Shape> shapes_of_heads() {
  return {
      {.heads = 8, .kv_heads = 8, .q_lens = {130}, .kv_lens = {700}, .mask = {.causal = true}},
      {.heads = 14, .kv_heads = 2, .dim = 24, .dtype = DType::bf16, .q_lens = {9}, .sinks = true},
      {.heads = 9,
       .kv_heads = 3,
       .dim = 40,
       .value_dim = 72,
       .q_lens = {1, 0, 17, 40},
       .kv_lens = {333, 50, 0, 40},
       .mask = {.causal = true}},
      {.heads = 7, .kv_heads = 1, .dtype = DType::fp16, .q_lens = {33}, .mask = {.window = 50}},
      {.heads = 8, .kv_heads = 4, .q_lens = {4}, .kv_lens = {0}},
      {.heads = 8, .kv_heads = 1, .q_lens = {0}, .kv_lens = {20}},
  };
}

}  // namespace longspan::tests
