// The exchange by heads between GPUs that reach each other, for one sequence, some heads at a time:
//
//     wave 0 comes    attend ........   attend ........   attend ........            the result
//                     wave 1, wave 2 come
//                                       rows of 0 leave   of 1               of 2
//
// A rank puts its rows of queries, keys and values straight to where the heads' rank attends to
// them in whole sequences, and finished rows to where their owner has them: nothing is packed, and
// one copy at the end makes the result. The first wave and the last rows, beside which nothing
// computes, are put by a kernel; all others by copy engines, beside the attention.
//
// Each of P ranks gets 1 / P of the heads, as with HeadExchange, which moves what this does not
// take.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "src/strategy/shared/head_exchange.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

inline constexpr int kMostHeadWaves = 8;

/// In how many waves ranks attend with `heads` each and `tokens` rows of the whole sequence: as
/// many as leave an attention enough work tiles for a GPU, and long enough for copies to come
/// beside it.
constexpr int count_head_waves(std::int64_t tokens, int heads) {
  constexpr std::int64_t kRowsOfAWave = 1 << 16;  // of one head: 512 tiles of 128 rows
  const std::int64_t waves = tokens * heads / kRowsOfAWave;
  const std::int64_t most = heads < kMostHeadWaves ? heads : kMostHeadWaves;
  return static_cast<int>(waves < 1 ? 1 : waves < most ? waves : most);
}

class HeadWaves {
 public:
  /// Opens the receive buffers, where the options do not ask for another way and there can be some.
  /// It is collective, and takes `exchange`'s memory for whole sequences into them.
  HeadWaves(const Layer& layer, HeadExchange& exchange);

  bool is_open() const { return receive_buffer_ != nullptr; }
  const ExchangeInfo& exchange() const { return info_; }

  /// Queues a run that `exchange` has prepared, result and all; or nothing, and returns false,
  /// where it is none of those that this takes: of one sequence, whose length the host knows, and
  /// of which every rank has a few stretches of neighbouring rows and keys. All ranks do alike.
  bool queue(Run& run) const;

 private:
  struct Way;  // of a run

  std::optional<Way> way_of(const Run& run) const;

  int ranks() const { return layer_.comm.size(); }
  int rank() const { return layer_.comm.rank(); }
  HeadWave wave_of(int rank, int wave, int waves) const {
    return head_wave(exchange_.share_of(rank), wave, waves);
  }

  comm::Transfers bring(const Run& run, const Way& way, const KeyBlock& own, int wave) const;
  void attend(Run& run, const Way& way, int wave) const;
  comm::Transfers take_back(const Run& run, const Way& way, int wave) const;
  void put_result(const Run& run, const Way& way, const kernels::MergeParams& asked) const;
  comm::Transfers start(const Run& run, std::vector<comm::Put> rows, std::int64_t received,
                        bool beside_attention, const char* step) const;

  Layer layer_;
  HeadExchange& exchange_;
  std::shared_ptr<std::byte> receive_buffer_;
  std::byte* rows_ = nullptr;       // [own rows, heads, value_dim] finished rows, as they come
  std::byte* lse_ = nullptr;        // [heads, own rows] of them
  std::uint64_t* words_ = nullptr;  // [ranks] what each rank says of the run
  ExchangeInfo info_;
};

/// What this costs, and HeadExchange where it does not serve.
RunCost head_waves_cost(const Options& options, int ranks, const RunSize& size);

}  // namespace longspan
