// Backward of strategies whose rows travel to the keys: rows, their dout and their terms go around
// the ring, and the dq of a guest returns while the next guest's rows are attended to. dk and dv
// never travel.
//
//     dq, dk, dv = gradients(my rows, my keys),   then for s = 1 ... P - 1:
//     dk, dv += ..., part = dq(rows of rank - s, my keys);   part goes to rank - s
//     dq += the part of rank + s
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "src/strategy/shared/dealt_rows.hpp"
#include "src/strategy/shared/gradient_memory.hpp"
#include "src/strategy/shared/gradient_ring.hpp"
#include "src/strategy/shared/row_starts.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class RowGradients {
 public:
  /// `rows` and `starts` outlive this.
  RowGradients(const LayerContext& layer, const DealtRows& rows, const RowStarts& starts);

  static double workspace_bytes(const Options& options, int ranks, const RunSize& size,
                                Device device);
  static BackwardCost cost(const Options& options, int ranks, const RunSize& size);
  void lay_out(Parts& memory);

  /// `pass` has this rank's own rows.
  void backward(Pass& pass, const GradientArgs& args);

 private:
  class Backward;

  /// Rows with what backward needs of them, dense. It does not own them.
  struct Rows {
    std::byte* q = nullptr;             // [rows, heads, head_dim]
    std::byte* dout = nullptr;          // [rows, heads, value_dim], room for fp32
    kernels::RowTerm* terms = nullptr;  // [rows, heads]
  };

  std::int64_t dout_bytes(DType dtype) const {
    return storage_of(dtype).bytes(std::int64_t{layer_.bounds.heads} * layer_.bounds.value_dim);
  }
  std::int64_t term_bytes() const {
    return layer_.bounds.heads * static_cast<std::int64_t>(sizeof(kernels::RowTerm));
  }

  bool is_on_gpu() const { return layer_.kernels.device() != Device::host; }
  /// The rows that this rank has room for in its sums, and sends. On GPUs, whose lengths the host
  /// does not know, they may be more than those of q.
  std::int64_t sum_rows(const Run& run) const;
  /// Whether the rows of one rank go to the keys of another. All ranks give the same answer.
  bool is_wanted(const Run& run, int rows, int keys) const;
  Rows own_rows(const Pass& pass, const GradientArgs& args) const;

  LayerContext layer_;
  const DealtRows& rows_;
  const RowStarts& starts_;
  TravellingKeys keys_;  // how many there are; they stay
  GradientMemory memory_;
  GradientRing ring_;
  std::byte* packed_q_ = nullptr;                    // on GPUs: own rows, if more travel
  std::byte* packed_dout_ = nullptr;                 // the same of dout, or if it is not dense
  std::array<Rows, GradientRing::kSlots> guests_{};  // rows of other ranks
};

}  // namespace longspan
