// Two rounds. First ranks compare what they ask for and where they are, since a rank 0 that knows
// all to be on its machine listens only at the loopback. Then rank 0 tells where it listens. An
// error on one rank before its turn is reported in it, so that no rank waits for one that has given
// up.
#include "comm/tcp/exchange.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <optional>

#include "comm/control/environment.hpp"
#include "comm/control/wire.hpp"
#include "comm/tcp/address.hpp"
#include "comm/tcp/control.hpp"
#include "comm/tcp/hello.hpp"
#include "comm/tcp/key.hpp"
#include "longspan/error.hpp"
#include "longspan/version.hpp"

namespace longspan::comm {
namespace {

/// A rank's report in a round: its error, or its texts.
std::string report_of(const std::function<std::string()>& texts) {
  Failure failure;
  try {
    return pack(std::string(), texts());
  } catch (const Error& error) {
    failure = {error.kind(), -1, "", error.what()};
  } catch (const std::exception& error) {
    failure = {ErrorKind::backend, -1, "", error.what()};
  }
  return pack(to_text(failure), std::string());
}

class Rounds {
 public:
  Rounds(int rank, int size, const ByteExchange& exchange)
      : rank_(rank), size_(size), exchange_(exchange) {}

  /// Every rank's texts, `count` of them. Every rank throws the same where one failed.
  std::vector<std::vector<std::string>> round(std::size_t count,
                                              const std::function<std::string()>& texts) const {
    const std::string mine = report_of(texts);
    const std::vector<std::string> all = exchange_(mine);
    if (static_cast<int>(all.size()) != size_)
      throw UsageError(
          fmt::format("The exchange gave {} texts to rank {} of {}: it has to give one of every "
                      "rank.",
                      all.size(), rank_, size_));
    if (all[rank_] != mine)
      throw UsageError(
          fmt::format("The exchange gave rank {} another text in its own place than the one that "
                      "it took: it has to give the texts in rank order, byte by byte.",
                      rank_));
    std::vector<std::vector<std::string>> every;
    every.reserve(all.size());
    for (int p = 0; p < size_; ++p) every.push_back(read(all[p], p, count));
    return every;
  }

 private:
  static std::vector<std::string> read(const std::string& text, int p, std::size_t count) {
    std::optional<Failure> failure;
    std::vector<std::string> texts;
    try {
      const auto parts = unpack(text, 2);
      if (parts[0].empty())
        texts = unpack(parts[1], count);
      else
        failure = failure_from(parts[0]);
    } catch (const Error&) {
      throw UsageError(
          fmt::format("What the exchange gave for rank {} is not what a rank of longspan {} says: "
                      "every rank must call from_exchange, of the same version, and the exchange "
                      "must keep every byte.",
                      p, LONGSPAN_VERSION));
    }
    if (!failure) return texts;
    failure->what = fmt::format("Rank {}: {}", p, failure->what);
    failure->rank = p;
    throw_failure(*failure);
  }

  int rank_;
  int size_;
  const ByteExchange& exchange_;
};

/// Throws on every rank alike where rank p has another place, or asks for something else.
void compare(const std::vector<std::vector<std::string>>& all) {
  const char* const names[] = {"the version of longspan", "the number of ranks", "the device"};
  const auto size = static_cast<int>(all.size());
  for (int p = 0; p < size; ++p) {
    for (int i = 0; i < 3; ++i)
      if (all[p][i] != all[0][i])
        throw UsageError(
            fmt::format("'{}' differs between ranks at 'from_exchange': rank 0 has {}, rank {} has "
                        "{}. Give every rank the same value.",
                        names[i], printable(all[0][i]), p, printable(all[p][i])));
    if (all[p][3] != std::to_string(p))
      throw UsageError(
          fmt::format("The exchange gave the text of rank {} in place {}: ranks are 0 to {}, each "
                      "of them once, and the exchange gives their texts in this order.",
                      printable(all[p][3]), p, size - 1));
  }
}

}  // namespace

std::unique_ptr<Control> exchange_control(int rank, int size, const ByteExchange& exchange,
                                          const CommOptions& options) {
  if (size < 1 || rank < 0 || rank >= size)
    throw UsageError(fmt::format(
        "from_exchange was given rank {} of {} ranks: ranks are 0 to size - 1.", rank, size));
  if (!exchange) throw UsageError("from_exchange was given no exchange: it takes a function.");
  const Rounds rounds(rank, size, exchange);

  milliseconds deadline{};
  const auto all = rounds.round(5, [&] {
    deadline = deadline_of(options);
    return pack(LONGSPAN_VERSION, std::to_string(size),
                std::string(options.device == Device::host ? "host" : "cuda"), std::to_string(rank),
                network_place());
  });
  compare(all);
  if (size == 1) return self_control(deadline);
  const bool within =
      std::all_of(all.begin(), all.end(), [&](const auto& one) { return one[4] == all[0][4]; });

  Meeting meeting{.rank = rank, .size = size, .door = {}, .key = {}};
  const auto where = rounds.round(3, [&] {
    if (rank != 0) return pack(std::string(), std::string(), std::string());
    meeting.door = open_door(within);
    meeting.key = fresh_key();
    return pack(std::to_string(meeting.door.port), meeting.key, pack_all(meeting.door.hosts));
  });
  if (rank != 0) {
    meeting.door.port = static_cast<int>(number_from(where[0][0], 1, 65535));
    meeting.key = where[0][1];
    meeting.door.hosts = unpack(where[0][2]);
  }
  return tcp_control(std::move(meeting), deadline, options.on_wait);
}

}  // namespace longspan::comm
