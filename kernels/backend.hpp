// One device's kernels and memory behind one interface, chosen once when a layer is made. Every
// call queues on the stream and returns; on the host it does the work.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "kernels/context.hpp"
#include "kernels/digest.hpp"
#include "kernels/epilogue.hpp"
#include "kernels/exchange.hpp"
#include "kernels/params.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

/// Marks on a stream and the time between them.
class Timer {
 public:
  virtual ~Timer() = default;
  virtual void mark(int index, Stream stream) = 0;
  virtual double milliseconds(int from, int to) const = 0;  // once the stream has passed both
};

/// What a strategy computes with.
class AttentionKernels {
 public:
  virtual ~AttentionKernels() = default;
  virtual Device device() const = 0;

  /// Throws Unsupported, by name, for what these kernels cannot do (features.hpp has the list).
  virtual void check(const AttendParams& params) const = 0;

  /// Most scratch that attend needs for up to `tokens` rows in up to `batch` sequences. Calls that
  /// resume need bounds that do: on CUDA, short or split queries then take a slot of states more.
  virtual std::size_t attend_scratch(const AttendParams& bounds) const = 0;

  /// Keys of this rank -> one partial state per row, and what `epilogue` makes of it; see
  /// AttendParams. New keys and values, where they are given, are written into the cache first.
  /// Steps of a ring, or chunks of the keys, that are given to one slot one after the other, all
  /// but the first with `resume`, leave there the state over all of them, and no merge between them
  /// is needed:
  ///
  ///     for (p.resume = false; next_keys(p); p.resume = true) kernels.attend(p, stream);
  ///
  /// State: max and sum [tokens, heads] in base 2, o [tokens, heads, dim] unnormalised, fp32. A
  /// chunk is a shard of the sequence (ranges of it, another rank's share), so that masks go by
  /// global positions. True: one kernel did both. Throws Unsupported as check does, and InputError
  /// for too little scratch; nothing is written then.
  virtual bool attend(const AttendParams& params, const Epilogue& epilogue, Stream stream,
                      const EpilogueBegins& begins = {}) const = 0;
  void attend(const AttendParams& params, Stream stream) const {
    attend(params, StateEpilogue{}, stream);
  }

  virtual void merge(const MergeParams& params, Stream stream) const = 0;

  /// Exchange of the ranks' states through peer buffers, and their merge, in one kernel.
  /// Unsupported where peer_buffer_bytes is 0.
  virtual void exchange(const ExchangeParams& params, Stream stream) const;
  /// Bytes of a peer buffer for it; 0: there is no such kernel.
  virtual std::size_t peer_buffer_bytes(std::int64_t /*rows*/, int /*dim*/, int /*ranks*/) const {
    return 0;
  }

  /// The digest of small arrays, where they lie.
  virtual void digest(const DigestParams& params, Stream stream) const = 0;
  /// What this rank says of its run, for the other ranks to compare (RunHeaders).
  virtual void say(const SayParams& params, Stream stream) const = 0;
  /// Zeroed memory that the host and the kernels both see.
  virtual std::shared_ptr<std::byte> shared_memory(std::size_t bytes) const = 0;

  virtual std::unique_ptr<Timer> timer(int marks) const = 0;

 protected:
  /// The epilogue as a kernel of its own.
  void queue(const Epilogue& epilogue, Stream stream, const EpilogueBegins& begins) const;
};

/// Rows that travel, and where they stand.
class RowKernels {
 public:
  virtual ~RowKernels() = default;
  virtual void map_rows(const MapParams& params, Stream stream) const = 0;
  virtual void place_rows(const PlaceParams& params, Stream stream) const = 0;
  virtual void key_starts(const KeyStartParams& params, Stream stream) const = 0;
};

/// What serving engines ask of one rank, and a layer of its cache.
class ServingKernels {
 public:
  virtual ~ServingKernels() = default;
  virtual void append(const AppendParams& params, Stream stream) const = 0;
  virtual void check_arrays(const CheckParams& params, Stream stream) const = 0;

  virtual void attend_context(const ContextParams& params, Stream stream) const = 0;
  virtual void cut_context(const ContextCutParams& params, Stream stream) const = 0;
  /// Memory with which attend_context is faster for calls within these bounds of the cached part.
  virtual std::size_t context_room(const AttendParams& /*bounds*/) const { return 0; }

  virtual void merge_outputs(const MergeOutputsParams& params, Stream stream) const = 0;
  virtual void pack_outputs(const PackOutputsParams& params, Stream stream) const = 0;
  virtual void export_segments(const ExportSegmentsParams& params, Stream stream) const = 0;
  virtual void reduce_segments(const ReduceSegmentsParams& params, Stream stream) const = 0;
};

class Backend : public AttentionKernels, public RowKernels, public ServingKernels {
 public:
  ~Backend() override = default;
};

/// `threads`: 0 takes LONGSPAN_THREADS, or else the cores that this process may use.
std::unique_ptr<Backend> host_backend(int threads = 0);

/// The current GPU. Throws Unsupported in a build without CUDA.
std::unique_ptr<Backend> cuda_backend();

}  // namespace longspan::kernels
