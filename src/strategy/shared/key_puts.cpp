#include "src/strategy/shared/key_puts.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "src/strategy/shared/dense_rows.hpp"
#include "src/strategy/shared/sent_rows.hpp"

namespace longspan {

using kernels::KeyArrivals;
using kernels::RowPuts;

namespace {

/// Whether an interval of the sequence has a key of the stretch.
bool meets(const Stretch& one, const Interval& keys) {
  return one.position < keys.end && one.position + one.count > keys.begin;
}

}  // namespace

/// The keys of each rank, and the pieces in which they travel.
struct KeyPuts::Ways {
  StretchesOfRanks keys;
  HeadShare all;  // heads
  HeadPieces heads;

  const std::vector<Stretch>& of(int rank) const { return keys[static_cast<std::size_t>(rank)]; }
};

KeyPuts::KeyPuts(const LayerContext& layer, const TravellingKeys& keys, std::int64_t rows)
    : layer_(layer),
      keys_(keys),
      puts_(layer, "exchange of keys and values"),
      route_(ranks()),
      underway_(ranks()) {
  if (layer_.options.exchange == Exchange::gather) return;
  puts_.open([&](Parts& memory) { whole_ = keys_.take_block(memory, rows); });
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

/// A kernel puts the keys, and the attention waits for them on the GPU.
class KeyPuts::Forward final : public Visitor {
 public:
  Forward(const PutExchange& exchange, const Pass& pass, RowPuts& puts, KeyArrivals& arrivals)
      : exchange_(exchange), pass_(pass), puts_(puts), arrivals_(arrivals) {}

  comm::Transfers start(const Move&) override {
    exchange_.put(pass_, puts_, arrivals_);
    return {};
  }
  void visit(const Step&, const kernels::BetweenTiles&) override {
    exchange_.attend(pass_, puts_, Phase::merge);
  }

 private:
  const PutExchange& exchange_;
  const Pass& pass_;
  RowPuts& puts_;
  KeyArrivals& arrivals_;
};

bool KeyPuts::queue(Pass& pass, const KeyBlock& copied) {
  const Run& run = pass.run;
  const std::optional<Ways> ways = ways_of(run);
  if (!ways) return false;
  puts_.compare(pass);
  keys_.begin(pass);
  const KeyBlock own = keys_.own_keys(run, copied);
  keys_.attend_to(pass, whole_, {.length = run.arrays.keys.length});
  KeyArrivals arrivals = arrivals_of(*ways, own);
  pass.attend.arrivals = &arrivals;
  const bool begins = layer_.kernels.takes_arrivals(pass.attend, pass.merge);
  if (!begins) pass.attend.arrivals = nullptr;
  RowPuts puts = puts_of(run, *ways, own, begins);
  make_gather({.ranks = ranks(), .parts = 1, .beside = begins}, route_);
  Forward forward(puts_, pass, puts, arrivals);
  walk(route_, pass, layer_.comm, nullptr, underway_, forward);
  puts_.end(run, received(run, *ways));
  return true;
}

/// The arrivals that the attention waits for, without the counters.
KeyArrivals KeyPuts::arrivals_of(const Ways& ways, const KeyBlock& own) const {
  KeyArrivals arrivals;
  arrivals.behind_puts = true;
  arrivals.rank = rank();
  arrivals.ranks = ranks();
  arrivals.k = keys_.keys_in(own);
  arrivals.v = keys_.values_in(own);
  arrivals.heads_a_piece = ways.heads.size;
  arrivals.portions = list_portions(ways.keys, rank(), arrivals.portion);
  return arrivals;
}

/// The puts of this rank: to every other rank the keys that rows there see. To itself, if its
/// attention reads own keys in place (`begins`), the ends of its stretches; otherwise all of them.
RowPuts KeyPuts::puts_of(const Run& run, const Ways& ways, const KeyBlock& own, bool begins) const {
  RowPuts puts;
  puts.pieces = ways.heads.count;
  puts.beside = begins;
  const int all = layer_.bounds.kv_heads, heads = ways.heads.of(ways.all, 0).kv.size();
  const auto put = [&](int to, const Stretch& one, std::byte* from, std::byte* place,
                       std::int64_t bytes) {
    const std::int64_t head_bytes = bytes / all;
    puts.add(
        block({from, all, head_bytes}, one.first, 0,
              {layer_.comm.place_at(place, to), all, head_bytes}, one.position, 0, one.count, all),
        heads * head_bytes);
  };
  const auto put_keys = [&](int to, const Stretch& one) {
    put(to, one, own.k, whole_.k, keys_.key_bytes());
    if (keys_.has_values()) put(to, one, own.v, whole_.v, keys_.value_bytes());
  };
  for (int distance = 1; distance < ranks(); ++distance) {
    const int to = (rank() + distance) % ranks();
    const Interval seen = keys_seen(run, layer_.kernels.device(), to);
    for (const Stretch& one : ways.of(rank()))
      if (meets(one, seen)) put_keys(to, one);
  }
  const std::int64_t most = begins ? KeyArrivals::kMargin : run.arrays.keys.length;
  for (const Stretch& one : ends_of(ways.of(rank()), most)) put_keys(rank(), one);
  puts.divide();
  return puts;
}

/// The bytes received.
std::size_t KeyPuts::received(const Run& run, const Ways& ways) const {
  const Interval seen = keys_seen(run, layer_.kernels.device(), rank());
  std::int64_t others = 0;
  for (int p = 0; p < ranks(); ++p)
    for (const Stretch& one : ways.of(p))
      if (p != rank() && meets(one, seen)) others += one.count;
  return static_cast<std::size_t>(others * (keys_.key_bytes() + keys_.value_bytes()));
}

HeadPieces pieces_of_keys(int heads, int kv_heads, double bytes) {
  return {heads, heads / kv_heads, pieces_of_bytes(bytes), true};
}

}  // namespace longspan
