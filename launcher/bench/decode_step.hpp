// The decode step of a model whose cache is sharded over the ranks, ready to be queued:
//
//     lengths += tokens                       once
//     append the new keys and values, attend  for each layer, on its own cache
//
// Lengths lie in device memory, so a captured step grows the sequences each time it is replayed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "launcher/bench/replays.hpp"
#include "launcher/judge/judge.hpp"
#include "launcher/problem/decode_inputs.hpp"
#include "longspan/longspan.hpp"

namespace longspan::launcher {

class DecodeStep {
 public:
  enum class Part {
    whole,
    append,  // the lengths and the appends
    own,     // on CUDA: as whole, over this rank's keys only, so that nothing travels
    read     // on CUDA: the same, with nothing appended
  };

  /// Makes the step. Collective. `pulse` is called now and then while something takes long.
  DecodeStep(const Communicator& world, const DecodeShape& shape, std::function<void()> pulse);

  /// Queues a step. On the host it is done on return, and spent() has the parts of its time.
  void queue(Part part, Stream stream);

  /// The work of queue(part), to be repeated.
  std::unique_ptr<Replays> repeat(Part part) {
    return queue_.repeat([this, part](Stream stream) { queue(part, stream); });
  }
  Stream stream() const { return queue_.stream(); }
  void wait() { layer_.wait(stream()); }

  /// Sets the lengths to those after `done` steps, and the outputs to NaN. Nothing may be queued.
  void restart(std::int64_t done);

  /// The milliseconds of the appends, and of the attention over own keys, of each step since the
  /// last call. Known only on the host.
  struct Spent {
    std::vector<double> append, attend;
  };
  Spent spent() { return std::exchange(spent_, {}); }

  /// Judges `samples` of the last step's outputs. Throws a SharedError where the lengths are not
  /// those after `done` steps, an output is not finite, or ranks have other bits. Collective.
  Judgement check(std::int64_t done, int samples);

  /// The digest of the outputs of all layers at the last check.
  std::uint64_t bits() const { return bits_; }
  const Attention& layer() const { return layer_; }

 private:
  struct Memory {
    std::vector<Buffer> caches;  // [batch, capacity, kv_heads, dim] each, or pages
    Buffer fresh, scale;
  };
  Memory fill_caches(const CacheInputs& inputs);
  void make_table();
  void make_args();
  void check_lengths(std::int64_t done) const;
  void check_finite(const Answer& outputs) const;
  Answer outputs() const;

  DecodeShape shape_;
  Communicator world_;
  std::function<void()> pulse_;
  std::int64_t capacity_;
  Queue queue_;
  Attention layer_;
  std::optional<Attention> own_layer_;  // on CUDA with several ranks, for Part::own and read
  DecodeInputs inputs_;
  Memory k_, v_;
  Buffer table_, query_start_, kv_len_, own_len_, q_, out_, lse_;
  Lengths lengths_;
  std::vector<Append> appends_;  // of each layer
  std::vector<AttentionArgs> args_, own_args_, read_args_;
  Spent spent_;
  std::uint64_t bits_ = 0, checks_ = 0;
};

}  // namespace longspan::launcher
