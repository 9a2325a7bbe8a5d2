// The layers that attend() has made for a communicator, and the merges of cross_rank_merge(), kept
// for calls with the same options. Ranks make the same calls in the same order, so they keep and
// drop the same ones.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "longspan/attention.hpp"
#include "longspan/buffer.hpp"
#include "longspan/merge.hpp"

namespace longspan::python {

/// Small arrays that a call omits where all sequences are the same: made once, on the device.
class UniformArrays {
 public:
  /// [count] int32: 0, step, 2 step ...
  Tensor steps(Device device, std::int64_t count, std::int64_t step);
  /// [count] int32, all `value`.
  Tensor constant(Device device, std::int64_t count, std::int64_t value);
  /// [values] int64; with `rows` above 1 [rows, values], all alike.
  Tensor table(Device device, const std::vector<std::int64_t>& values, std::int64_t rows = 1);

 private:
  struct Entry {
    std::int64_t count, first, step;
    Buffer memory;
  };
  Tensor take(Device device, std::int64_t count, std::int64_t first, std::int64_t step);

  struct Table {
    std::vector<std::int64_t> values;
    std::int64_t rows;
    Buffer memory;
  };

  std::list<Entry> entries_;  // most recent first
  std::list<Table> tables_;   // likewise
};

struct KeptLayer {
  KeptLayer(const Communicator& world, const Options& given)
      : options(given), layer(world, given) {}
  Options options;
  Attention layer;
  UniformArrays arrays;
};

class KeptLayers {
 public:
  static constexpr std::size_t kMost = 16;

  /// The layer for these options, made now (which is collective) where there is none.
  KeptLayer& find(const Communicator& world, const Options& options);
  /// Likewise a merge.
  CrossRankMerge& find(const Communicator& world, const MergeOptions& options, LogBase base);
  void wait(Stream stream);
  std::size_t size() const { return kept_layers_.size() + merges_.size(); }
  void clear() {
    kept_layers_.clear();
    merges_.clear();
  }

 private:
  std::list<std::unique_ptr<KeptLayer>> kept_layers_;  // most recent first
  std::list<std::unique_ptr<CrossRankMerge>> merges_;  // likewise
};

/// The least power of two that is at least n, so that growing sizes find the same layer.
std::int64_t rounded_up(std::int64_t n);

}  // namespace longspan::python
