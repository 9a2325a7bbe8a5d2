#include "src/strategy/shared/key_puts.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "src/strategy/shared/dense_rows.hpp"
#include "src/strategy/shared/queue_beside.hpp"
#include "src/strategy/shared/receive_memory.hpp"

namespace longspan {

using kernels::KeyArrivals;

/// Which keys each rank has, and in which pieces they go.
struct KeyPuts::Ways {
  StretchesOfRanks keys;
  HeadShare all;  // heads
  HeadPieces heads;

  const std::vector<Stretch>& of(int rank) const { return keys[static_cast<std::size_t>(rank)]; }
  /// What ranks say of the run, the heads, and keys that nobody sees.
  int pieces() const { return 2 + heads.count; }
};

KeyPuts::KeyPuts(const Layer& layer, const TravellingKeys& keys, std::int64_t rows)
    : layer_(layer), keys_(keys) {
  if (layer_.options.exchange == Exchange::gather) return;
  receive_buffer_ = open_receive_memory(layer_, info_, [&](Parts& memory) {
    whole_ = keys_.take_block(memory, rows);
    words_ = memory.take_array<std::uint64_t>(static_cast<std::size_t>(ranks()));
  });
}

std::optional<KeyPuts::Ways> KeyPuts::ways_of(const Run& run) const {
  const RunArrays& arrays = run.arrays;
  if (!is_open() || !is_one_known_sequence(arrays) ||
      arrays.keys.length > std::numeric_limits<std::int32_t>::max())
    return std::nullopt;
  auto keys = stretches_of_ranks(arrays.keys, ranks(), arrays.keys.length);
  if (!keys) return std::nullopt;
  const int heads = layer_.bounds.heads, kv_heads = layer_.bounds.kv_heads;
  const std::int64_t sent = most_rows(*keys) * (keys_.key_bytes() + keys_.value_bytes());
  return Ways{*std::move(keys),
              {{0, heads}, {0, kv_heads}},
              pieces_of_keys(heads, kv_heads, static_cast<double>(sent))};
}

bool KeyPuts::queue(Run& run, const KeyBlock& copied) const {
  const std::optional<Ways> ways = ways_of(run);
  if (!ways) return false;
  const std::vector<Stretch>& stretches = ways->of(rank());
  run.compare_in(words_, rank());
  run.say_to(layer_.kernels);
  keys_.begin(run);
  const KeyBlock own = keys_.own_keys(run, copied);
  keys_.attend_to(run, whole_, {.length = run.arrays.keys.length});
  const KeyArrivals arrivals = arrivals_of(run, *ways, own);
  run.attend.arrivals = &arrivals;
  const bool begins = layer_.kernels.takes_arrivals(run.attend, run.merge, run.stream);
  if (!begins) run.attend.arrivals = nullptr;

  run.enter(Phase::exchange);
  comm::Transfers coming;
  queue_beside(
      layer_.comm, run.stream, 1,
      [&] {
        copy_own(run, stretches, own, begins ? KeyArrivals::kMargin : run.arrays.keys.length);
      },
      [&] { coming = start(run, *ways, own); });
  if (!begins) coming.wait(run.stream);
  run.enter(Phase::attend);
  run.attend_to(run.merge, Phase::merge, layer_.kernels);
  coming.wait(run.stream);
  return true;
}

/// What the attention waits for; the signals of runs before are lowered ahead of it, and of what
/// raises them.
KeyArrivals KeyPuts::arrivals_of(const Run& run, const Ways& ways, const KeyBlock& own) const {
  KeyArrivals arrivals;
  arrivals.signals = layer_.comm.lower_signals(receive_buffer_.get(), ways.pieces(), run.stream);
  arrivals.rank = rank();
  arrivals.ranks = ranks();
  arrivals.k = keys_.keys_in(own);
  arrivals.v = keys_.values_in(own);
  arrivals.heads_a_piece = ways.heads.size;
  arrivals.portions = list_portions(ways.keys, rank(), arrivals.portion);
  return arrivals;
}

/// Copies own keys to where whole sequences have them: of each stretch the first and the last
/// `most`.
void KeyPuts::copy_own(const Run& run, const std::vector<Stretch>& stretches, const KeyBlock& own,
                       std::int64_t most) const {
  std::vector<StridedCopy> copies;
  for (const Stretch& one : ends_of(stretches, most)) {
    const auto rows = [&](const std::byte* from, std::byte* to, std::int64_t bytes) {
      copies.push_back(
          {from + one.first * bytes, to + one.position * bytes, bytes, bytes, bytes, one.count});
    };
    rows(own.k, whole_.k, keys_.key_bytes());
    rows(own.v, whole_.v, keys_.value_bytes());
  }
  if (!copies.empty()) layer_.rows.copy_rows(copies, run.stream);
}

/// Puts this rank's word and its keys to all others, some heads after the other (KeyArrivals). Keys
/// that no row there sees go last, as a piece of their own that nobody waits for.
comm::Transfers KeyPuts::start(const Run& run, const Ways& ways, const KeyBlock& own) const {
  comm::Puts puts{.buffer = receive_buffer_.get(), .pieces = ways.pieces()};
  for (int distance = 1; distance < ranks(); ++distance) {
    const int to = (rank() + distance) % ranks();
    puts.puts.push_back(put_of_word(words_ + rank(), to));
    const Interval seen = keys_seen(run, layer_.kernels.device(), to);
    for (const Stretch& one : ways.of(rank())) {
      const bool is_seen = one.position < seen.end && one.position + one.count > seen.begin;
      const auto put = [&](int piece, const HeadRange& heads, std::byte* from, std::byte* place,
                           std::int64_t bytes) {
        const int all = layer_.bounds.kv_heads;
        puts.puts.push_back(
            {to,
             block({from, all, bytes / all}, one.first, heads.begin, {place, all, bytes / all},
                   one.position, heads.begin, one.count, heads.size()),
             piece});
      };
      const auto put_keys = [&](int piece, const HeadRange& heads) {
        put(piece, heads, own.k, whole_.k, keys_.key_bytes());
        put(piece, heads, own.v, whole_.v, keys_.value_bytes());
      };
      if (!is_seen) {
        put_keys(puts.pieces - 1, ways.all.kv);
        continue;
      }
      for (int i = 0; i < ways.heads.count; ++i) put_keys(1 + i, ways.heads.of(ways.all, i).kv);
    }
  }
  const std::int64_t others = run.arrays.keys.length - count_rows(ways.of(rank()));
  puts.received = static_cast<std::size_t>(others * (keys_.key_bytes() + keys_.value_bytes()));
  return layer_.comm.start_puts(puts, run.stream, "exchange of keys and values");
}

/// Two pieces at least: the heads of the first are attended to while the others come.
HeadPieces pieces_of_keys(int heads, int kv_heads, double bytes) {
  return {heads, heads / kv_heads, std::max(pieces_of_bytes(bytes), 2), true};
}

}  // namespace longspan
