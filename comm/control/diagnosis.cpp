#include "comm/control/diagnosis.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace longspan::comm {
namespace {

template <class Wrong>
std::optional<int> find(std::span<const Peer> peers, Wrong wrong) {
  const auto peer = std::find_if(peers.begin(), peers.end(), wrong);
  if (peer == peers.end()) return std::nullopt;
  return static_cast<int>(peer - peers.begin());
}

}  // namespace

Failure Diagnosis::departure(int p) const {
  return unless_refused({ErrorKind::rank_failure, p, own_.step,
                         fmt::format("Rank {} {} before '{}' was done. Its own output says why.",
                                     name_of(p), peers_[p].left ? "left" : "died", own_.step)});
}

std::optional<Failure> Diagnosis::disagreement() const {
  const auto text = [&](int p, int q) -> std::optional<std::string> {
    const auto &one = peers_[p].waits, &other = peers_[q].waits;
    const bool known = one && other && one->run == other->run && !one->description.empty() &&
                       !other->description.empty();
    if (!known) return std::nullopt;
    return difference(one->description, name_of(p), other->description, name_of(q), own_.step);
  };
  for (int p = 0; p < size(); ++p)
    for (int q = p + 1; q < size(); ++q)
      if (const auto what = text(p, q)) return Failure{ErrorKind::usage, q, own_.step, *what};
  return std::nullopt;
}

Failure Diagnosis::verdict(std::optional<int> mute_relay) const {
  if (auto found = disagreement()) return *std::move(found);
  if (const auto p = find(peers_, [](const Peer& peer) { return peer.gone && !peer.waits; }))
    return departure(*p);
  if (const auto p = find(peers_, [](const Peer& peer) { return !peer.waits; }))
    return mute_relay ? mute(*mute_relay) : absence(*p);
  if (auto found = other_step()) return *std::move(found);
  return lateness();
}

Failure Diagnosis::mute(int relay) const {
  return {ErrorKind::timeout, relay, own_.step,
          fmt::format("Rank {} did not come to '{}' within the deadline of {}. It passes on what "
                      "ranks tell each other, and nothing comes through it, so nothing is known "
                      "of the others. It may be stopped; LONGSPAN_DEADLINE_S sets the deadline.",
                      relay >= 0 ? name_of(relay) : "0 of all", own_.step, deadline())};
}

Failure Diagnosis::absence(int p) const {
  std::vector<std::string> others;
  for (int other = p + 1; other < size(); ++other)
    if (!peers_[other].waits) others.push_back(name_of(other));
  const std::string nor =
      others.empty() ? "" : fmt::format(" (nor did ranks {})", fmt::join(others, ", "));
  return unless_refused(late(p, fmt::format("did not come to '{}' within the deadline of {}{}",
                                            own_.step, deadline(), nor)));
}

std::optional<Failure> Diagnosis::other_step() const {
  const std::string& usual = usual_step();
  const auto p = find(peers_, [&](const Peer& peer) { return peer.waits->step != usual; });
  if (!p) return std::nullopt;
  return unless_refused({ErrorKind::rank_failure, *p, own_.step,
                         fmt::format("Rank {} waits at '{}' while others wait at '{}': {}",
                                     name_of(*p), peers_[*p].waits->step, usual, kSameOrder)});
}

Failure Diagnosis::lateness() const {
  const auto [last, first] = std::minmax_element(
      peers_.begin(), peers_.end(),
      [](const Peer& a, const Peer& b) { return a.waits->waited < b.waits->waited; });
  if (last->waits->waited < first->waits->waited / 2)
    return late(static_cast<int>(last - peers_.begin()),
                fmt::format("came to '{}' too late: rank {} had waited for {}", own_.step,
                            name_of(static_cast<int>(first - peers_.begin())),
                            seconds(first->waits->waited)));
  return {ErrorKind::timeout, -1, own_.step,
          fmt::format("'{}' was not done within the deadline of {}, although every rank answers: "
                      "the exchange itself does not finish.",
                      own_.step, deadline())};
}

Failure Diagnosis::late(int p, const std::string& how) const {
  return {ErrorKind::timeout, p, own_.step,
          fmt::format("Rank {} {}. It may be stopped, stuck or much slower; LONGSPAN_DEADLINE_S "
                      "sets the deadline.",
                      name_of(p), how)};
}

/// The failure of a missing rank. Where it refused its call of the run that others are in, the
/// failure has that reason, and the difference between the two calls.
Failure Diagnosis::unless_refused(Failure absent) const {
  const auto& refused = peers_[absent.rank].refused;
  if (!refused) return absent;
  int witness = control_.rank();
  WaitNotice waits = own_;
  for (int p = 0; p < size(); ++p) {  // in a roll call every rank takes the same one
    if (p == absent.rank || !peers_[p].waits || peers_[p].waits->description.empty()) continue;
    witness = p, waits = *peers_[p].waits;
    break;
  }
  if (waits.run.place != refused->place) return absent;
  auto& known = waits.description;  // it was refused before the remainder
  known.resize(std::min(known.size(), refused->description.size()));
  const auto text =
      difference(known, name_of(witness), refused->description, name_of(absent.rank), absent.step);
  if (text) absent = {ErrorKind::usage, absent.rank, absent.step, *text};
  absent.what +=
      fmt::format(" Rank {} refused this call: {}", name_of(absent.rank), refused->reason);
  return absent;
}

/// The step where most ranks wait; in a tie the lowest rank's.
const std::string& Diagnosis::usual_step() const {
  const auto votes = [&](const Peer& candidate) {
    return std::count_if(peers_.begin(), peers_.end(), [&](const Peer& peer) {
      return peer.waits->step == candidate.waits->step;
    });
  };
  return std::max_element(peers_.begin(), peers_.end(),
                          [&](const Peer& a, const Peer& b) { return votes(a) < votes(b); })
      ->waits->step;
}

}  // namespace longspan::comm
