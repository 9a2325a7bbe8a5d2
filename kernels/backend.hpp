// One device's kernels and memory behind one interface, chosen once when a layer is made. Every
// call queues on the stream and returns; on the host it does the work.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "kernels/digest.hpp"
#include "kernels/exchange.hpp"
#include "kernels/gather.hpp"
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

class Backend {
 public:
  virtual ~Backend() = default;
  virtual Device device() const = 0;

  /// Throws Unsupported, by name, for what these kernels cannot do (features.hpp has the list).
  virtual void check(const AttendParams& params) const = 0;

  /// Most scratch that attend needs for up to `tokens` rows in up to `batch` sequences. Calls that
  /// resume need bounds that do: on CUDA, short or split queries then take a slot of states more.
  virtual std::size_t attend_scratch(const AttendParams& bounds) const = 0;

  /// Keys of this rank -> the partial states in params.state; see AttendParams. Steps of a ring, or
  /// chunks of the keys, that are given to one slot one after the other, all but the first with
  /// `resume`, leave there the state over all of them, and no merge between them is needed:
  ///
  ///     for (p.resume = false; next_keys(p); p.resume = true) backend.attend(p, stream);
  ///
  /// State: max and sum [tokens, heads] in base 2, o [tokens, heads, dim] unnormalised, fp32. A
  /// chunk is a shard of the sequence (ranges of it, another rank's share), so that masks go by
  /// global positions. Throws Unsupported as check does, and InputError for too little scratch;
  /// nothing is written then.
  virtual void attend(const AttendParams& params, Stream stream) const = 0;

  /// Whether a call with these new_k and new_v writes them into the cache itself; else append does,
  /// ahead of a call without them.
  virtual bool writes_new_keys(const AttendParams&) const { return false; }

  /// Long queries over pages by way of a copy; false, or no room: not by this way.
  virtual bool attend_gathered(const GatheredParams&, Stream) const { return false; }
  virtual std::size_t gather_room(const AttendParams& /*bounds*/) const { return 0; }

  virtual void merge(const MergeParams& params, Stream stream) const = 0;

  /// Attend and merge in one, where all keys are on this rank and a kernel can end the rows by
  /// itself; false: nothing was done, and the caller takes the two steps. With `resume` the keys of
  /// this call are the last ones, whosever the others were, and the merge is of the one slot
  /// (merge.states: params.slot alone): out = finish(merge(state in the slot, this call's), sink).
  /// The slot may be written or not.
  virtual bool attend_finished(const AttendParams&, const MergeParams&, Stream) const {
    return false;
  }

  /// Exchange of the ranks' states through windows, and their merge, in one kernel.
  virtual void exchange(const ExchangeParams& params, Stream stream) const;
  /// Attend and exchange, with the states pushed by the kernel that makes them of their pieces;
  /// false: nothing was done, and the caller takes the two steps. Ranks of one exchange may differ
  /// in that: what travels is the same. The rank's slot may be written or not.
  virtual bool attend_exchanged(const AttendParams&, const ExchangeParams&, Stream) const {
    return false;
  }
  /// Whether attend_exchanged is for calls like this one, on all ranks alike (though some may have
  /// too few keys for it): ExchangeParams::pushed.
  virtual bool is_decode(const AttendParams&) const { return false; }
  /// Bytes of a window for it; 0: there is no such kernel.
  virtual std::size_t exchange_window(std::int64_t /*rows*/, int /*dim*/, int /*ranks*/) const {
    return 0;
  }

  /// The digest of small arrays, where they lie.
  virtual void digest(const DigestParams& params, Stream stream) const = 0;
  /// What this rank says of its run, for the other ranks to compare (RunHeaders).
  virtual void say(const SayParams& params, Stream stream) const = 0;
  /// Zeroed memory that the host and the kernels both see.
  virtual std::shared_ptr<std::byte> shared_memory(std::size_t bytes) const = 0;

  virtual void map_rows(const MapParams& params, Stream stream) const = 0;
  virtual void place_rows(const PlaceParams& params, Stream stream) const = 0;
  virtual void key_starts(const KeyStartParams& params, Stream stream) const = 0;

  // What serving engines ask of one rank. Where there is no kernel yet: Unsupported, by name.
  virtual void merge_outputs(const MergeOutputsParams& params, Stream stream) const;
  virtual void export_segments(const ExportSegmentsParams& params, Stream stream) const;
  virtual void reduce_segments(const ReduceSegmentsParams& params, Stream stream) const;
  virtual void append(const AppendParams& params, Stream stream) const;
  virtual void cut_context(const ContextCutParams& params, Stream stream) const;
  virtual void check_arrays(const CheckParams& params, Stream stream) const;

  virtual std::unique_ptr<Timer> timer(int marks) const = 0;
};

/// `threads`: 0 takes LONGSPAN_THREADS, or else the cores that this process may use.
std::unique_ptr<Backend> host_backend(int threads = 0);

/// The current GPU. Throws Unsupported in a build without CUDA.
std::unique_ptr<Backend> cuda_backend();

}  // namespace longspan::kernels
