// The messages of a mailbox and their encoding: a byte for the kind, then the fields as texts
// (wire.hpp).
//     g step text      GatherPart
//     w waited step place layer run description
//                      WaitNotice
//     r place reason description
//                      Refusal; without fields RefusalWithdrawn
//     f failure        Failure: the communicator has ended
//     e                Echo
//     s number body    GroupMessage
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "comm/control/agreement.hpp"
#include "comm/control/failure.hpp"
#include "comm/control/patience.hpp"

namespace longspan::comm {

/// This rank's part of a gather.
struct GatherPart {
  std::string step;
  std::string text;
};

/// In a roll call: this rank still runs, waits at `step`, and was given this for the run in
/// question.
struct WaitNotice {
  std::string step;
  milliseconds waited;
  AskedRun run = {};
  std::vector<std::string> description = {};  // names and values of the run, in turn
};

/// This rank refused the call that would have been its run at this place.
struct Refusal {
  std::uint64_t place;
  std::string reason;
  std::vector<std::string> description;  // names and values, in turn

  bool operator==(const Refusal&) const = default;
};

/// This rank called again after a refusal, and has begun that run.
struct RefusalWithdrawn {};

/// A message to oneself, through the process that relays messages: proof that it does.
struct Echo {};

/// A message of the group of this number, which was split from this communicator. An empty one is
/// the last: this rank has left the group.
struct GroupMessage {
  std::uint32_t number;
  std::string body;
};

using ControlMessage =
    std::variant<GatherPart, WaitNotice, Refusal, RefusalWithdrawn, Failure, Echo, GroupMessage>;

std::string encode(const ControlMessage& message);
/// Throws an internal Error for a message that no rank of this version writes.
ControlMessage decode(const std::string& text);

/// A rank's request at a split; `number` is the lowest that its group may have.
struct SplitRequest {
  int color;
  int key;
  std::uint32_t number;
};
std::string encode(const SplitRequest& request);
SplitRequest decode_split_request(const std::string& text);

}  // namespace longspan::comm
