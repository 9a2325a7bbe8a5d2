#include "src/strategy/shared/key_puts.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "src/divided_up.hpp"
#include "src/strategy/shared/queue_beside.hpp"
#include "src/strategy/shared/receive_memory.hpp"

namespace longspan {

int count_key_pieces(int kv_heads, double bytes) {
  constexpr double kPieceBytes = 16 << 20;
  const double most = std::min(kernels::KeyArrivals::kMostPieces, kv_heads);
  return static_cast<int>(std::clamp(bytes / kPieceBytes, 1.0, most));
}

KeyPuts::KeyPuts(const Layer& layer, const TravellingKeys& keys, std::int64_t rows)
    : layer_(layer), keys_(keys) {
  const int kv_heads = layer_.bounds.kv_heads;
  const std::int64_t bytes = keys_.block_rows() * (keys_.key_bytes() + keys_.value_bytes());
  piece_heads_ = static_cast<int>(
      divided_up(kv_heads, count_key_pieces(kv_heads, static_cast<double>(bytes))));
  if (layer_.options.exchange == Exchange::gather) return;
  receive_buffer_ = open_receive_memory(layer_, info_, [&](Parts& memory) {
    whole_ = keys_.take_block(memory, rows);
    words_ = memory.take_array<std::uint64_t>(static_cast<std::size_t>(ranks()));
  });
}

int KeyPuts::pieces() const {
  return 2 + static_cast<int>(divided_up(layer_.bounds.kv_heads, piece_heads_));
}

std::optional<KeyPuts::Ways> KeyPuts::ways_of(const Run& run) const {
  const RunArrays& arrays = run.arrays;
  if (!is_open() || !is_one_known_sequence(arrays) ||
      arrays.keys.length > std::numeric_limits<std::int32_t>::max())
    return std::nullopt;
  Ways ways;
  for (int p = 0; p < ranks(); ++p) {
    auto keys = stretches_of(arrays.keys.with_rank(p), arrays.keys.length);
    if (!keys) return std::nullopt;
    ways.push_back(std::move(*keys));
  }
  return ways;
}

bool KeyPuts::queue(Run& run, const KeyBlock& copied) const {
  const std::optional<Ways> ways = ways_of(run);
  if (!ways) return false;
  const std::vector<Stretch>& stretches = (*ways)[static_cast<std::size_t>(rank())];
  run.compare_in(words_, rank());
  run.say_to(layer_.kernels);
  keys_.begin(run);
  const KeyBlock own = keys_.own_keys(run, copied);
  keys_.attend_to(run, whole_, {.length = run.arrays.keys.length});
  const kernels::KeyArrivals arrivals = arrivals_of(run, stretches, own);
  run.attend.arrivals = &arrivals;
  const bool begins = layer_.kernels.takes_arrivals(run.attend, run.merge, run.stream);
  if (!begins) run.attend.arrivals = nullptr;

  run.enter(Phase::exchange);
  comm::Transfers coming;
  queue_beside(
      layer_.comm, run.stream, 1,
      [&] {
        copy_own(run, stretches, own,
                 begins ? kernels::KeyArrivals::kMargin : run.arrays.keys.length);
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
kernels::KeyArrivals KeyPuts::arrivals_of(const Run& run, const std::vector<Stretch>& own,
                                          const KeyBlock& keys) const {
  static_assert(kMostStretches <= kernels::KeyArrivals::kMostStretches);
  kernels::KeyArrivals arrivals;
  arrivals.signals = layer_.comm.lower_signals(receive_buffer_.get(), pieces(), run.stream);
  arrivals.rank = rank();
  arrivals.ranks = ranks();
  arrivals.heads = piece_heads_;
  arrivals.k = keys_.keys_in(keys);
  arrivals.v = keys_.values_in(keys);
  for (const Stretch& one : own)
    arrivals.own[arrivals.stretches++] = {static_cast<int>(one.position),
                                          static_cast<int>(one.count), static_cast<int>(one.first)};
  return arrivals;
}

/// Copies own keys to where whole sequences have them: of each stretch the first and the last
/// `most`.
void KeyPuts::copy_own(const Run& run, const std::vector<Stretch>& own, const KeyBlock& keys,
                       std::int64_t most) const {
  std::vector<StridedCopy> copies;
  const auto copy = [&](std::int64_t first, std::int64_t position, std::int64_t count) {
    const auto rows = [&](const std::byte* from, std::byte* to, std::int64_t bytes) {
      copies.push_back({from + first * bytes, to + position * bytes, bytes, bytes, bytes, count});
    };
    rows(keys.k, whole_.k, keys_.key_bytes());
    rows(keys.v, whole_.v, keys_.value_bytes());
  };
  for (const Stretch& one : own) {
    if (one.count <= 2 * most) {
      copy(one.first, one.position, one.count);
      continue;
    }
    const std::int64_t rest = one.count - most;
    copy(one.first, one.position, most);
    copy(one.first + rest, one.position + rest, most);
  }
  if (!copies.empty()) layer_.rows.copy_rows(copies, run.stream);
}

/// Puts this rank's word and its keys to all others, piece by piece (KeyArrivals). Keys that no row
/// there sees go last, as a piece of their own that nobody waits for.
comm::Transfers KeyPuts::start(const Run& run, const Ways& ways, const KeyBlock& own) const {
  const int kv_heads = layer_.bounds.kv_heads;
  const int unseen = pieces() - 1;
  const std::vector<Stretch>& stretches = ways[static_cast<std::size_t>(rank())];
  comm::Puts puts{.buffer = receive_buffer_.get(), .pieces = pieces()};
  for (int distance = 1; distance < ranks(); ++distance) {
    const int to = (rank() + distance) % ranks();
    auto* const word = reinterpret_cast<std::byte*>(words_ + rank());
    const std::int64_t size = sizeof *words_;
    puts.puts.push_back({to, {word, word, size, size, size, 1}, 0});

    const Interval seen = keys_seen(run, layer_.kernels.device(), to);
    const auto put = [&](const Stretch& one, HeadRange heads, int piece) {
      const auto rows = [&](const std::byte* from, std::byte* place, std::int64_t bytes) {
        const std::int64_t head = bytes / kv_heads, first = heads.begin * head;
        puts.puts.push_back(
            {to,
             {from + one.first * bytes + first, place + one.position * bytes + first, bytes, bytes,
              heads.size() * head, one.count},
             piece});
      };
      rows(own.k, whole_.k, keys_.key_bytes());
      rows(own.v, whole_.v, keys_.value_bytes());
    };
    for (const Stretch& one : stretches) {
      if (one.position >= seen.end || one.position + one.count <= seen.begin) {
        put(one, {0, kv_heads}, unseen);
        continue;
      }
      for (int piece = 0; 1 + piece < unseen; ++piece)
        put(one, {piece * piece_heads_, std::min((piece + 1) * piece_heads_, kv_heads)}, 1 + piece);
    }
  }
  const std::int64_t others = run.arrays.keys.length - count_rows(stretches);
  puts.received = static_cast<std::size_t>(others * (keys_.key_bytes() + keys_.value_bytes()));
  return layer_.comm.start_puts(puts, run.stream, "exchange of keys and values");
}

}  // namespace longspan
