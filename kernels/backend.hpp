// One device's kernels and memory behind one interface, chosen once when a layer is made. On a GPU
// every call queues on the stream and returns; on the host it does the work.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "kernels/context.hpp"
#include "kernels/copy_keys.hpp"
#include "kernels/digest.hpp"
#include "kernels/epilogue.hpp"
#include "kernels/exchange.hpp"
#include "kernels/gradient_params.hpp"
#include "kernels/move_keys.hpp"
#include "kernels/params.hpp"
#include "kernels/row_puts.hpp"
#include "longspan/types.hpp"
#include "src/base/strided_copy.hpp"

namespace longspan::kernels {

/// Records marks on a stream, and measures the time between them.
class Timer {
 public:
  virtual ~Timer() = default;
  virtual void mark(int index, Stream stream) = 0;
  virtual double milliseconds(int from, int to) const = 0;  // once the stream has passed both
};

/// The kernels that strategies compute with.
class AttentionKernels {
 public:
  virtual ~AttentionKernels() = default;
  virtual Device device() const = 0;

  /// Throws Unsupported, naming the feature, for what these kernels cannot do (features.hpp has the
  /// list).
  virtual void check(const AttendParams& params) const = 0;

  /// The most scratch that attend needs for up to `tokens` rows in up to `batch` sequences. For
  /// calls that resume, set `resume` in the bounds: on CUDA, short or split queries then need one
  /// more slot of states.
  virtual std::size_t attend_scratch(const AttendParams& bounds) const = 0;

  /// Turns the keys of this rank into one partial state per row, and applies `epilogue` to it (see
  /// AttendParams). New keys and values, if given, are first written into the cache. Steps of a
  /// ring, or chunks of the keys, may use one slot one after another, all but the first with
  /// `resume`. The slot then holds the state over all of them, without a merge between them:
  ///
  ///     for (p.resume = false; next_keys(p); p.resume = true) kernels.attend(p, stream);
  ///
  /// A state is max and sum [tokens, heads] in base 2, and o [tokens, heads, dim] unnormalised, in
  /// fp32. A chunk is a shard of the sequence (ranges of it, another rank's share), so masks use
  /// global positions. Returns true if one kernel did both. Throws Unsupported as check does, and
  /// InputError for too little scratch; nothing is written then.
  ///
  /// On CPUs the calling thread calls `between` from time to time between its work tiles, so that a
  /// transfer that needs calls makes progress; it must not throw. On a GPU nothing calls it.
  virtual bool attend(const AttendParams& params, const Epilogue& epilogue, Stream stream,
                      const EpilogueBegins& begins = {},
                      const BetweenTiles& between = {}) const = 0;
  void attend(const AttendParams& params, Stream stream) const {
    attend(params, StateEpilogue{}, stream);
  }
  /// Whether `attend` with these params, this epilogue and their `arrivals` may be queued before
  /// the data of other ranks has arrived. It may then end at the epilogue's `places`, if there are
  /// any, and waits on the device.
  virtual bool takes_arrivals(const AttendParams& /*params*/,
                              const MergeParams& /*epilogue*/) const {
    return false;
  }

  virtual void merge(const MergeParams& params, Stream stream) const = 0;

  /// Exchanges the ranks' states through peer buffers and merges them, in one kernel. Throws
  /// Unsupported if peer_buffer_bytes is 0.
  virtual void exchange(const ExchangeParams& params, Stream stream) const;
  /// The bytes of a peer buffer for the exchange; 0 if there is no such kernel.
  virtual std::size_t peer_buffer_bytes(std::int64_t /*rows*/, int /*dim*/, int /*ranks*/) const {
    return 0;
  }

  /// Computes the digest of small arrays on their device.
  virtual void digest(const DigestParams& params, Stream stream) const = 0;
  /// Stores this rank's report of its run, for the other ranks to compare (RunHeaders).
  virtual void write_run_digest(const RunDigestParams& params, Stream stream) const = 0;
  /// Allocates zeroed memory that the host and the kernels both see.
  virtual std::shared_ptr<std::byte> shared_memory(std::size_t bytes) const = 0;

  virtual std::unique_ptr<Timer> timer(int marks) const = 0;

 protected:
  /// Queues the epilogue as a separate kernel.
  void queue(const Epilogue& epilogue, Stream stream, const EpilogueBegins& begins) const;
};

/// The kernels of rows that travel, and of their positions.
class RowKernels {
 public:
  virtual ~RowKernels() = default;
  virtual void map_rows(const MapParams& params, Stream stream) const = 0;
  virtual void place_rows(const PlaceParams& params, Stream stream) const = 0;
  virtual void rotate_rows(const RotateParams& params, Stream stream) const = 0;
  virtual void pack_outputs(const PackOutputsParams& params, Stream stream) const = 0;
  /// Copies blocks that do not overlap; on a GPU also blocks in other GPUs' memory, if it can reach
  /// it.
  virtual void copy_rows(std::span<const StridedCopy> copies, Stream stream) const = 0;
  /// Puts rows into the memory of all ranks, on GPUs; the attention queued next may run beside it
  /// (KeyArrivals::behind_puts). Throws Unsupported on CPUs.
  virtual void put_rows(const RowPuts& puts, Stream stream) const;
  virtual void pack_states(const PackStatesParams& params, Stream stream) const = 0;
  virtual void key_starts(const KeyStartParams& params, Stream stream) const = 0;
  virtual void row_starts(const RowStartParams& params, Stream stream) const = 0;
  virtual void copy_keys(const CopyKeysParams& params, Stream stream) const = 0;
  virtual void move_keys(const MoveKeysParams& params, Stream stream) const = 0;
};

/// The kernels that serving engines use on one rank, and that a layer uses for its cache.
class ServingKernels {
 public:
  virtual ~ServingKernels() = default;
  virtual void append(const AppendParams& params, Stream stream) const = 0;
  virtual void check_arrays(const CheckParams& params, Stream stream) const = 0;

  virtual void attend_context(const ContextParams& params, Stream stream) const = 0;
  virtual void cut_context(const ContextCutParams& params, Stream stream) const = 0;
  /// The bytes of memory that make attend_context faster, for calls within these bounds of the
  /// cached part.
  virtual std::size_t context_room(const AttendParams& /*bounds*/) const { return 0; }

  virtual void merge_outputs(const MergeOutputsParams& params, Stream stream) const = 0;
  virtual void export_segments(const ExportSegmentsParams& params, Stream stream) const = 0;
  virtual void reduce_segments(const ReduceSegmentsParams& params, Stream stream) const = 0;
};

/// The kernels of backward.
class GradientKernels {
 public:
  virtual ~GradientKernels() = default;
  /// Loads the code of kernels that follow an exchange. CUDA may wait for the GPU's work when it
  /// loads code, and an exchange that lacks a rank ends only when a thread ends it, which may wait
  /// for the load.
  virtual void load_gradients() const {}
  /// The most scratch that attend_gradients needs within these bounds.
  virtual std::size_t gradient_scratch(const GradientParams& bounds) const;
  /// Makes what backward needs of each row. Throws Unsupported on GPUs, as the others do.
  virtual void row_terms(const RowTermParams& params, Stream stream) const;
  virtual void sink_gradients(const SinkGradientParams& params, Stream stream) const;
  /// Whether attend_gradients can store the gradients where GradientParams::stores says.
  virtual bool stores_gradients(const GradientParams& /*params*/) const { return false; }
  /// Adds up the gradients of a block of rows and a block of keys. On CPUs the calling thread calls
  /// `between`, as in AttentionKernels::attend.
  virtual void attend_gradients(const GradientParams& params, Stream stream,
                                const BetweenTiles& between = {}) const;
  /// Widens dout and dlse to fp32.
  virtual void widen_gradients(const WidenGradientsParams& params, Stream stream) const;
  /// Zeros in `count` floats.
  virtual void clear_sums(float* sums, std::int64_t count, Stream stream) const;
  /// to += from, `count` floats of GradientSums, a multiple of 16.
  virtual void add_sums(float* to, const float* from, std::int64_t count, Stream stream) const;
  virtual void add_sums(double* to, const double* from, std::int64_t count, Stream stream) const;
  /// Adds the sums of values that are the first columns of their keys to those of the keys.
  virtual void add_to_first_columns(const AddColumnsParams& params, Stream stream) const;
  /// Makes sums of gradients of rotated rows those of the rows before.
  virtual void turn_back_sums(const TurnBackParams& params, Stream stream) const;
  virtual void turn_back_keys(const TurnBackKeysParams& params, Stream stream) const;
  /// Rounds sums of gradients, and stores them.
  virtual void store_gradients(const StoreGradientParams& params, Stream stream) const;
};

class Backend : public AttentionKernels,
                public RowKernels,
                public ServingKernels,
                public GradientKernels {
 public:
  ~Backend() override = default;
};

/// The host's kernels. With `threads` 0 it takes LONGSPAN_THREADS, or else the cores that this
/// process may use.
std::unique_ptr<Backend> host_backend(int threads = 0);

/// How the host makes products of bf16 on this machine if DTypes::bf16_products allows it: "by
/// AMX", or "in fp32" if the CPU has no instructions for them; and then, if asked for, how it makes
/// those of gradients. The bits differ.
std::string host_bf16_products(bool with_gradients);

/// The kernels of the current GPU. Throws Unsupported in a build without CUDA.
std::unique_ptr<Backend> cuda_backend();

}  // namespace longspan::kernels
