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
#include <string>
#include <vector>

#include "src/strategy/route.hpp"
#include "src/strategy/shared/dealt_rows.hpp"
#include "src/strategy/shared/gradient_memory.hpp"
#include "src/strategy/shared/returning_sums.hpp"
#include "src/strategy/shared/walk.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class RowGradients {
 public:
  /// `rows` outlives this.
  RowGradients(const LayerContext& layer, const DealtRows& rows);

  static double workspace_bytes(const Options& options, int ranks, const RunSize& size);
  void lay_out(Parts& memory);

  void backward(Pass& pass, const GradientArgs& args);

 private:
  class Backward;
  static constexpr std::size_t kSlots = 2;  // of guests

  /// Rows with what backward needs of them, dense. It does not own them.
  struct Rows {
    std::byte* q = nullptr;             // [rows, heads, head_dim]
    std::byte* dout = nullptr;          // [rows, heads, value_dim], room for fp32
    kernels::RowTerm* terms = nullptr;  // [rows, heads]
  };

  int rank() const { return layer_.comm.rank(); }
  int ranks() const { return layer_.comm.size(); }
  int rank_at(int distance) const { return (rank() + distance + ranks()) % ranks(); }
  std::int64_t dout_bytes(DType dtype) const {
    return storage_of(dtype).bytes(std::int64_t{layer_.bounds.heads} * layer_.bounds.value_dim);
  }
  std::int64_t term_bytes() const {
    return layer_.bounds.heads * static_cast<std::int64_t>(sizeof(kernels::RowTerm));
  }
  std::int32_t* starts_of(const Run& run, int rank) const {
    return starts_ + std::int64_t{rank} * (run.arrays.batch + 1);
  }

  void find_starts(Pass& pass) const;
  Rows own_rows(const Run& run, const GradientArgs& args) const;
  comm::Transfers start_rows(const Run& run, const GradientArgs& args, const Move& move,
                             const Rows& own) const;

  LayerContext layer_;
  const DealtRows& rows_;
  TravellingKeys keys_;  // how many there are; they stay
  GradientMemory memory_;
  ReturningSums returning_;
  std::vector<std::string> row_steps_;  // names of steps, by distance
  Route route_;                         // of the current run
  Underway underway_;
  std::int32_t* starts_ = nullptr;     // [ranks, batch + 1] of the rows of each rank
  std::byte* packed_dout_ = nullptr;   // this rank's dout, if it is not dense
  std::array<Rows, kSlots> guests_{};  // rows of other ranks
};

}  // namespace longspan
