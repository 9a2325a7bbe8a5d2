#include "src/layer/rotation.hpp"

#include <cmath>
#include <numbers>

#include "src/arguments/tensor_checks.hpp"

namespace longspan {
std::vector<std::uint64_t> turns_of(const RopeOptions& rope) {
  std::vector<std::uint64_t> turns;
  for (int pair = 0; pair < rope.dim / 2; ++pair) {
    const long double power = -2.0L * static_cast<long double>(pair) / rope.dim;
    const long double turn = std::pow(static_cast<long double>(rope.base), power) /
                             (2 * std::numbers::pi_v<long double> * rope.scale);
    turns.push_back(static_cast<std::uint64_t>(std::ldexp(turn - std::floor(turn), 64)));
  }
  return turns;
}

void RotatedRows::lay_out(Parts& memory) {
  if (!*this) return;
  rows_ = memory.take(static_cast<std::size_t>(rotated_bytes(options_)));
  if (options_.queries)
    start_ =
        memory.take_array<std::int32_t>(static_cast<std::size_t>(options_.limits.max_batch) + 1);
}

void RotatedRows::allocate(Device device) {
  if (!*this) return;
  const std::vector<std::uint64_t> turns = turns_of(options_.rope);
  turns_ = Buffer(device, turns.size() * sizeof turns[0]);
  turns_.upload(turns.data());
}

Rope RotatedRows::rope(const RunArrays& arrays) const {
  Rope rope = arrays.rope;
  if (!rope.cos.values) rope.turns = static_cast<const std::uint64_t*>(turns_.data());
  return rope;
}

Tensor RotatedRows::view(const Tensor& q) const {
  Tensor rows(rows_, q.dtype, {count_rows(q), options_.heads, options_.head_dim});
  rows.device = q.device;
  return rows;
}

const std::int32_t* RotatedRows::starts(const RunArrays& arrays) const {
  const bool sharded = *this && options_.queries && arrays.queries.ranks > 1;
  return sharded && arrays.query_start != nullptr ? start_ : nullptr;
}

void RotatedRows::rotate(const Run& run, const kernels::TokenRows& q,
                         const kernels::Backend& with) const {
  run.enter(Phase::attend);
  if (run.rotated_starts != nullptr)
    with.row_starts(
        {run.arrays.queries, run.arrays.query_start, run.arrays.batch, start_, run.attend.tokens},
        run.stream);
  kernels::RotateParams p = run.rotation();
  p.from = q;
  p.to = run.attend.q;
  with.rotate_rows(p, run.stream);
}

}  // namespace longspan
