// The starts of sequences in each rank's query rows, for runs of several sequences whose queries
// are sharded.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/strategy/strategy.hpp"

namespace longspan {

class RowStarts {
 public:
  explicit RowStarts(const LayerContext& layer) : layer_(layer) {}

  void lay_out(Parts& memory) {
    if (layer_.comm.size() == 1) return;
    starts_ =
        memory.take_array<std::int32_t>(static_cast<std::size_t>(layer_.comm.size()) *
                                        (static_cast<std::size_t>(layer_.bounds.batch.size) + 1));
  }

  /// Queues the computation of those of a run.
  void find(const Run& run) const {
    if (!are_found(run)) return;
    for (int p = 0; p < layer_.comm.size(); ++p)
      layer_.kernels.row_starts(
          {run.arrays.queries.with_rank(p), run.arrays.query_start, run.arrays.batch, at(run, p)},
          run.stream);
  }

  /// Points a batch at the rows of a rank, if it has several sequences.
  void give(const Run& run, int rank, kernels::Batch& batch) const {
    if (are_found(run)) batch.query_start = at(run, rank);
  }

 private:
  bool are_found(const Run& run) const {
    return layer_.comm.size() > 1 && run.arrays.query_start != nullptr;
  }
  std::int32_t* at(const Run& run, int rank) const {
    return starts_ + std::int64_t{rank} * (run.arrays.batch + 1);
  }

  LayerContext layer_;
  std::int32_t* starts_ = nullptr;  // [ranks, batch + 1]
};

}  // namespace longspan
