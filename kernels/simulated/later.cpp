// Events that happen later than they are requested: copies of threads and of TMA, products of the
// tensor cores, and words to other GPUs. Each waits here until a schedule releases it, or until a
// thread waits for it; its destination is poison meanwhile.
#include <algorithm>
#include <cstring>

#include "kernels/simulated/state.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace longspan::simulated {
namespace {

std::vector<Lane*> copying;      // with copies in flight
std::vector<Warp*> multiplying;  // with committed groups
std::vector<std::unique_ptr<EngineCopy>> engine_copies;

struct Word {
  void* to;
  std::uint64_t value;
  int bytes;
  const Block* block;
  const Grid* grid;
};
/// In flight to the same eight bytes, in the order in which they were sent: usually one.
class Sent {
 public:
  Sent(std::uintptr_t place, const Word& word) : place_(place), first_(word) {}
  std::uintptr_t place() const { return place_; }
  std::size_t size() const { return 1 + more_.size(); }
  const Word& operator[](std::size_t i) const { return i == 0 ? first_ : more_[i - 1]; }
  void push(const Word& word) { more_.push_back(word); }
  /// False: it was the last.
  bool pop() {
    if (more_.empty()) return false;
    first_ = more_.front();
    more_.erase(more_.begin());
    return true;
  }

 private:
  std::uintptr_t place_;
  Word first_;
  std::vector<Word> more_;
};
std::vector<Sent> sent;

/// Maps the address of a word to its index in `sent`: a hash table with room for twice as many,
/// with linear probing.
class Places {
 public:
  static constexpr std::size_t kNone = ~std::size_t{0};

  std::size_t find(std::uintptr_t place) const {
    if (count_ == 0) return kNone;
    for (std::size_t at = first(place);; at = (at + 1) & mask()) {
      if (table_[at].which == kNone) return kNone;
      if (table_[at].place == place) return table_[at].which;
    }
  }
  void set(std::uintptr_t place, std::size_t which) {
    if (2 * (count_ + 1) > table_.size()) grow();
    std::size_t at = first(place);
    while (table_[at].which != kNone && table_[at].place != place) at = (at + 1) & mask();
    count_ += table_[at].which == kNone;
    table_[at] = {place, which};
  }
  void erase(std::uintptr_t place) {
    std::size_t free = first(place);
    while (table_[free].place != place || table_[free].which == kNone) free = (free + 1) & mask();
    // Entries after it move up, unless that would put them before their own hash index.
    for (std::size_t at = (free + 1) & mask(); table_[at].which != kNone; at = (at + 1) & mask())
      if (((at - first(table_[at].place)) & mask()) >= ((at - free) & mask())) {
        table_[free] = table_[at];
        free = at;
      }
    table_[free].which = kNone;
    --count_;
  }

 private:
  struct Entry {
    std::uintptr_t place = 0;
    std::size_t which = kNone;
  };
  std::size_t mask() const { return table_.size() - 1; }
  std::size_t first(std::uintptr_t place) const {
    return place * 0x9e3779b97f4a7c15u >> 32 & mask();
  }
  void grow() {
    std::vector<Entry> old(table_.empty() ? 64 : 2 * table_.size());
    old.swap(table_);
    count_ = 0;
    for (const Entry& entry : old)
      if (entry.which != kNone) set(entry.place, entry.which);
  }

  std::vector<Entry> table_;
  std::size_t count_ = 0;
};
Places places;

/// The reads and writes of an event that happens now, which are attributed to its agent when it is
/// over: until then all accesses are the machine's own.
struct Access {
  void* where;
  std::size_t bytes;
};
std::vector<Access> reads, writes;
/// The warp whose products or copies are reading now, and the instruction that queued them.
const Warp* reader = nullptr;
Site reader_site;

void note_reads(Agent& agent) {
  if constexpr (kDetectsRaces)
    agent.act([] {
      for (const Access& access : reads) note_read(access.where, access.bytes);
    });
  reads.clear();
}
void note_writes() {
  for (const Access& access : writes) note_write(access.where, access.bytes);
  writes.clear();
}

/// Memory with a pending write is NaN until then, and AddressSanitizer reports accesses to it.
void poison(void* to, std::size_t bytes) {
  std::memset(to, 0xff, bytes);
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(to, bytes);
#endif
}
void unpoison([[maybe_unused]] void* to, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(to, bytes);
#endif
}

/// Calls use(word, bits) for the bits of these bytes of shared memory in `under_way`.
template <class Use>
void for_each_piece(const Block& block, const std::byte* at, std::size_t bytes, const Use& use) {
  std::size_t piece = static_cast<std::size_t>(at - block.shared) / kPiece;
  const std::size_t end =
      (static_cast<std::size_t>(at - block.shared) + bytes + kPiece - 1) / kPiece;
  while (piece < end) {
    const std::size_t first = piece % 64, count = std::min(64 - first, end - piece);
    use(piece / 64, ~std::uint64_t{0} >> (64 - count) << first);
    piece += count;
  }
}
/// A copy into shared memory begins.
void await(Block& block, std::byte* to, std::size_t bytes) {
  for_each_piece(block, to, bytes,
                 [&](std::size_t word, std::uint64_t bits) { block.under_way[word] |= bits; });
  poison(to, bytes);
}
/// It is about to write its data.
void end_await(Block& block, std::byte* to, std::size_t bytes) {
  for_each_piece(block, to, bytes,
                 [&](std::size_t word, std::uint64_t bits) { block.under_way[word] &= ~bits; });
  unpoison(to, bytes);
}

template <class T>
void remove(std::vector<T*>& list, T* what) {
  list.erase(std::find(list.begin(), list.end(), what));
}

// ---- copies of threads -------------------------------------------------------------------------

void queue_copy(Copy copy) {
  Lane& lane = *current;
  if (lane.copies.empty()) copying.push_back(&lane);
  copy.number = ++lane.queued;
  lane.copies.push_back(copy);
  lane.copies_queued.release();
  if (schedule().land >= 1) land_one();
}

void land(Lane& lane, std::size_t which) {
  const Copy copy = lane.copies[which];
  lane.copies.erase(lane.copies.begin() + static_cast<std::ptrdiff_t>(which));
  if (lane.copies.empty()) remove(copying, &lane);
  MBarrier* const barrier =
      copy.barrier ? &mbarrier_at(*lane.warp->block, copy.barrier, copy.site) : nullptr;
  lane.copier.act([&] {
    lane.copies_queued.acquire();
    if (barrier != nullptr) {
      barrier->order[barrier->phase & 1].release();
    } else {
      note_read(copy.from, static_cast<std::size_t>(copy.bytes));
      note_write(copy.to, static_cast<std::size_t>(copy.size));
    }
    lane.copies_landed.release();
  });
  if (barrier != nullptr) return arrive_at(*barrier, 1, 0, 0, copy.site);
  end_await(*lane.warp->block, copy.to, static_cast<std::size_t>(copy.size));
  std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.bytes));
  std::memset(copy.to + copy.bytes, 0, static_cast<std::size_t>(copy.size - copy.bytes));
}

/// Lands some copy of the lane; an arrival only when all copies before it have landed.
void land_some(Lane& lane) {
  std::size_t which = 0;
  if (lane.copies.front().barrier == nullptr) {
    std::size_t plain = 1;  // of those before the first arrival
    while (plain < lane.copies.size() && lane.copies[plain].barrier == nullptr) ++plain;
    which = pick(static_cast<unsigned>(plain));
  }
  land(lane, which);
}

// ---- products ----------------------------------------------------------------------------------

void write_back(Warp& warp, Accumulators& sums) {
  for (std::size_t l = 0; l < 32; ++l)
    unpoison(sums.registers[l], static_cast<std::size_t>(sums.count) * sizeof(float));
  for (std::size_t l = 0; l < 32; ++l)
    std::memcpy(sums.registers[l], &sums.values[l * static_cast<std::size_t>(sums.count)],
                static_cast<std::size_t>(sums.count) * sizeof(float));
  warp.accumulators.erase(std::find_if(warp.accumulators.begin(), warp.accumulators.end(),
                                       [&](const auto& each) { return each.get() == &sums; }));
}

void execute_group(Warp& warp) {
  std::vector<QueuedProduct> group = std::move(warp.groups.front());
  warp.groups.pop_front();
  if (warp.groups.empty()) remove(multiplying, &warp);
  for (QueuedProduct& product : group) {
    void* lanes[32];
    for (std::size_t l = 0; l < 32; ++l) lanes[l] = product.data.data() + l * product.bytes;
    Accumulators& sums = *product.accumulators;
    float* values[32];
    for (std::size_t l = 0; l < 32; ++l)
      values[l] = &sums.values[l * static_cast<std::size_t>(sums.count)];
    reader = &warp;
    reader_site = product.site;
    product.run(lanes, values);
    note_reads(warp.proxy);
    warp.proxy.release(warp.products_done);
    if (--sums.pending == 0) write_back(warp, sums);
  }
}

// ---- TMA ---------------------------------------------------------------------------

void land_engine_copy(std::size_t which) {
  const std::unique_ptr<EngineCopy> copy = std::move(engine_copies[which]);
  engine_copies.erase(engine_copies.begin() + static_cast<std::ptrdiff_t>(which));
  Block& block = *copy->warp->block;
  --block.engine_copies;
  MBarrier& barrier = mbarrier_at(block, copy->barrier, copy->site);
  reader = copy->warp;
  reader_site = copy->site;
  end_await(block, copy->to, static_cast<std::size_t>(copy->bytes));
  copy->land();
  note_reads(copy->warp->proxy);  // it was written for TMA, or by a kernel before
  copy->warp->engine.act([&] {
    copy->queued.acquire();
    note_writes();
    barrier.order[barrier.phase & 1].release();
    barrier.proxy_order[barrier.phase & 1].release();
  });
  arrive_at(barrier, 0, 0, copy->bytes, copy->site);
}

// ---- words -------------------------------------------------------------------------------------

std::uintptr_t place_of(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) / 8;
}

/// Delivers the first of those in flight to one address; false: it was the last.
bool deliver(std::size_t which) {
  const Word word = sent[which][0];
  if (word.bytes == 8)
    __atomic_store_n(static_cast<std::uint64_t*>(word.to), word.value, __ATOMIC_RELAXED);
  else
    __atomic_store_n(static_cast<std::uint32_t*>(word.to), static_cast<std::uint32_t>(word.value),
                     __ATOMIC_RELAXED);
  note_progress();
  if (sent[which].pop()) return true;
  places.erase(sent[which].place());
  if (which + 1 < sent.size()) {
    sent[which] = std::move(sent.back());
    places.set(sent[which].place(), which);
  }
  sent.pop_back();
  return false;
}

/// Delivers those of this address up to the last that `is_wanted`.
template <class Wanted>
void deliver_up_to(std::size_t which, const Wanted& is_wanted) {
  const Sent& words = sent[which];
  std::size_t count = words.size();
  while (count > 0 && !is_wanted(words[count - 1])) --count;
  for (; count > 0; --count) deliver(which);
}

}  // namespace

bool land_one() {
  const std::size_t all = copying.size() + multiplying.size() + engine_copies.size();
  if (all == 0) return false;
  std::size_t which = pick(static_cast<unsigned>(all));
  note_progress();
  if (which < copying.size())
    land_some(*copying[which]);
  else if ((which -= copying.size()) < multiplying.size())
    execute_group(*multiplying[which]);
  else
    land_engine_copy(which - multiplying.size());
  return true;
}

bool is_awaited(const Block& block, const std::byte* at, std::size_t bytes) {
  std::uint64_t any = 0;
  for_each_piece(block, at, bytes, [&](std::size_t word, std::uint64_t bits) {
    any |= block.under_way[word] & bits;
  });
  return any != 0;
}
bool is_under_way() { return !copying.empty() || !multiplying.empty() || !engine_copies.empty(); }

bool deliver_one() {
  if (sent.empty()) return false;
  deliver(pick(static_cast<unsigned>(sent.size())));
  return true;
}
void deliver_all(const Grid* of) {
  // From the end, because a later one replaces an empty entry.
  for (std::size_t which = sent.size(); which-- > 0;)
    deliver_up_to(which, [&](const Word& word) { return of == nullptr || word.grid == of; });
}
std::size_t stores_in_flight() { return sent.size(); }
void deliver_words() { deliver_all(nullptr); }

void finish_copies(Block& block) {
  if (block.engine_copies > 0) {
    Site site = {};
    for (const auto& copy : engine_copies)
      if (copy->warp->block == &block) site = copy->site;
    fail("a block ended while TMA was writing to its shared memory", site);
  }
  for (Lane& lane : block.lanes)
    while (!lane.copies.empty()) land_some(lane);
  for (Warp& warp : block.warps)
    if (!warp.groups.empty() || !warp.open.empty())
      fail("a warp ended while its products were under way (no wgmma.wait_group)");
}

// ---- instructions ------------------------------------------------------------------------------

void copy_async(std::uint32_t to, const void* from, int size, int bytes, Site site) {
  may_yield(site);
  const Quiet quiet;
  std::byte* const place = shared_pointer(to, size, size, "cp.async", site);
  if (bytes < 0 || bytes > size) fail("cp.async of more bytes than it has room for", site);
  if (bytes > 0 && reinterpret_cast<std::uintptr_t>(from) % static_cast<unsigned>(size) != 0)
    fail("cp.async from an address that is not a multiple of its size", site);
  await(*current->warp->block, place, static_cast<std::size_t>(size));
  queue_copy({.to = place,
              .from = static_cast<const std::byte*>(from),
              .size = size,
              .bytes = bytes,
              .site = site});
}
void commit_copies() {
  const Quiet quiet;
  current->groups.push_back(current->queued);
}
void wait_copies(int pending, Site) {
  const Quiet quiet;
  Lane& lane = *current;
  while (lane.groups.size() > static_cast<std::size_t>(pending)) {
    while (!lane.copies.empty() && lane.copies.front().number <= lane.groups.front()) {
      std::size_t mine = 1;  // of this group and those before
      while (mine < lane.copies.size() && lane.copies[mine].number <= lane.groups.front() &&
             lane.copies[mine].barrier == nullptr)
        ++mine;
      land(lane, lane.copies.front().barrier ? 0 : pick(static_cast<unsigned>(mine)));
    }
    lane.groups.erase(lane.groups.begin());
  }
  lane.copies_landed.acquire();
}
void barrier_expect_copies(void* word, Site site) {
  may_yield(site);
  const Quiet quiet;
  MBarrier& barrier = mbarrier_at(*current->warp->block, word, site);
  ++barrier.pending;
  queue_copy({.barrier = word, .site = site});
}

void copy_by_engine(std::uint32_t to, int bytes, void* barrier, std::function<void()> land,
                    Site site) {
  may_yield(site);
  const Quiet quiet;
  Warp& warp = *current->warp;
  auto copy = std::make_unique<EngineCopy>();
  copy->warp = &warp;
  copy->to = shared_pointer(to, bytes, 16, "cp.async.bulk", site);
  copy->bytes = bytes;
  copy->barrier = barrier;
  copy->land = std::move(land);
  copy->site = site;
  mbarrier_at(*warp.block, barrier, site);
  await(*warp.block, copy->to, static_cast<std::size_t>(bytes));
  copy->queued.release();
  ++warp.block->engine_copies;
  engine_copies.push_back(std::move(copy));
  if (schedule().land >= 1) land_one();
}
void engine_reads(const void* from, std::size_t bytes) { product_reads(from, bytes); }
void engine_writes(void* to, std::size_t bytes) {
  if constexpr (kDetectsRaces) writes.push_back({to, bytes});
}

void begin_products(Site site) {
  meet_all(
      "wgmma.fence", nullptr, [](void* const(&)[32], unsigned) { current->warp->may_queue = true; },
      site);
}

void queue_product(void* data, std::size_t bytes, float* accumulators, int count, Product run,
                   Site site) {
  struct Share {
    void* data;
    std::size_t bytes;
    float* registers;
    int count;
    Product* run;
    Site site;
  } share{data, bytes, accumulators, count, &run, site};
  meet_all(
      "wgmma.mma_async", &share,
      [](void* const(&lanes)[32], unsigned) {
        Warp& warp = *current->warp;
        const Share& first = *static_cast<Share*>(lanes[0]);
        if (!warp.may_queue)
          fail("wgmma without wgmma.fence since its registers were handed back", first.site);
        QueuedProduct product;
        product.bytes = first.bytes;
        product.data.resize(32 * first.bytes);
        product.run = std::move(*first.run);
        product.site = first.site;
        for (const auto& each : warp.accumulators)
          if (each->registers[0] == first.registers) product.accumulators = each.get();
        if (product.accumulators == nullptr) {
          warp.accumulators.push_back(std::make_unique<Accumulators>());
          Accumulators& sums = *(product.accumulators = warp.accumulators.back().get());
          sums.count = first.count;
          sums.values.resize(32 * static_cast<std::size_t>(first.count));
          for (std::size_t l = 0; l < 32; ++l) {
            const auto size = static_cast<std::size_t>(first.count) * sizeof(float);
            sums.registers[l] = static_cast<Share*>(lanes[l])->registers;
            std::memcpy(&sums.values[l * static_cast<std::size_t>(first.count)], sums.registers[l],
                        size);
            poison(sums.registers[l], size);
          }
        }
        if (product.accumulators->count != first.count)
          fail("wgmma adds to registers of which others are under way", first.site);
        ++product.accumulators->pending;
        for (std::size_t l = 0; l < 32; ++l)
          std::memcpy(product.data.data() + l * first.bytes, static_cast<Share*>(lanes[l])->data,
                      first.bytes);
        warp.open.push_back(std::move(product));
      },
      site);
}

void commit_products(Site site) {
  meet_all(
      "wgmma.commit_group", nullptr,
      [](void* const(&)[32], unsigned) {
        Warp& warp = *current->warp;
        if (warp.groups.empty()) multiplying.push_back(&warp);
        warp.groups.push_back(std::move(warp.open));
        warp.open.clear();
        if (schedule().land >= 1) execute_group(warp);
      },
      site);
}

void wait_products(int pending, Site site) {
  meet_all(
      "wgmma.wait_group", &pending,
      [](void* const(&lanes)[32], unsigned) {
        Warp& warp = *current->warp;
        const auto most = static_cast<std::size_t>(*static_cast<int*>(lanes[0]));
        while (warp.groups.size() > most) execute_group(warp);
        warp.may_queue = false;
      },
      site);
  current->warp->products_done.acquire();
}
void product_reads(const void* from, std::size_t bytes) {
  // ThreadSanitizer does not see quiet stores. At least a warp's own have to be fenced.
  const auto* const begin = static_cast<const std::byte*>(from);
  for (const Unfenced& store : reader->unfenced)
    if (store.place < begin + bytes && begin < static_cast<std::byte*>(store.place) + store.bytes)
      fail(
          "the asynchronous proxy reads what its own warp has stored, and not fenced "
          "(fence.proxy.async)",
          reader_site);
  if (const Block& block = *reader->block;
      begin >= block.shared && begin < block.own_variables && is_awaited(block, begin, bytes))
    fail("the asynchronous proxy reads shared memory into which a copy has not landed",
         reader_site);
  if constexpr (kDetectsRaces) reads.push_back({const_cast<void*>(from), bytes});
}

void fence_shared_proxy(Site) {
  Warp& warp = *current->warp;
  warp.fenced.release();
  warp.proxy.acquire(warp.fenced);
  std::erase_if(warp.unfenced, [](const Unfenced& store) { return store.by == current; });
}
void fence_global_proxy(Site site) { fence_shared_proxy(site); }

// ---- words -------------------------------------------------------------------------------------

void send_word(void* to, std::uint64_t value, int bytes, Site site) {
  may_yield(site);
  const Quiet quiet;
  if (reinterpret_cast<std::uintptr_t>(to) % static_cast<unsigned>(bytes) != 0)
    fail("a store to an address that is not a multiple of its size", site);
  const Block* block = current->warp->block;
  const Word word = {to, value, bytes, block, block->grid.get()};
  std::size_t which = places.find(place_of(to));
  if (which != Places::kNone) {
    sent[which].push(word);
  } else {
    which = sent.size();
    sent.emplace_back(place_of(to), word);
    places.set(place_of(to), which);
  }
  if (schedule().deliver >= 1) deliver(which);
}
std::uint64_t fetch_word(const void* from, int bytes, Site site) {
  // A thread that reads again and again waits for another.
  if (++current->fetches % 16 == 0)
    spin(site);
  else
    may_yield(site);
  const Quiet quiet;
  if (reinterpret_cast<std::uintptr_t>(from) % static_cast<unsigned>(bytes) != 0)
    fail("a load from an address that is not a multiple of its size", site);
  const Block* block = current->warp->block;
  if (const std::size_t which = places.find(place_of(from)); which != Places::kNone)
    deliver_up_to(which, [&](const Word& word) { return word.block == block; });
  return bytes == 8 ? __atomic_load_n(static_cast<const std::uint64_t*>(from), __ATOMIC_RELAXED)
                    : __atomic_load_n(static_cast<const std::uint32_t*>(from), __ATOMIC_RELAXED);
}
std::uint64_t acquire_word(const void* from, int bytes, Site site) {
  const std::uint64_t word = fetch_word(from, bytes, site);
  acquire_at(from);
  return word;
}
void count_word(std::uint64_t* word, std::uint64_t more, Site site) {
  fence_words(site);
  release_at(word);
  const Quiet quiet;
  __atomic_fetch_add(word, more, __ATOMIC_RELEASE);
}
void fence_words(Site site) {
  may_yield(site);
  const Quiet quiet;
  deliver_all(current->warp->block->grid.get());
}

}  // namespace longspan::simulated
