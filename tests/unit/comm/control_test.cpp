// The control plane against a mailbox that delivers anything. What no rank writes is a typed error
// that names the sender, and the communicator has ended. And the end itself: the first of many
// failures is kept, whichever thread finds it.
#include "comm/control/control.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "comm/control/mailbox.hpp"
#include "comm/control/patience.hpp"
#include "comm/control/wire.hpp"
#include "longspan/error.hpp"
#include "tests/support/fresh_seed.hpp"

namespace longspan::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;
using Message = Mailbox::Message;

/// Rank 0 with a mailbox that the test writes. A message from rank 0 itself is read as nothing.
class Written final : public Mailbox {
 public:
  Written(std::deque<Message> messages, int size) : messages_(std::move(messages)), size_(size) {}
  int rank() const override { return 0; }
  int size() const override { return size_; }
  void post(int, const std::string& text) override { posted.push_back(text); }
  std::vector<std::string> posted;
  std::optional<Message> next() override {
    if (messages_.empty()) return std::nullopt;
    Message message = messages_.front();
    messages_.pop_front();
    if (message.from == 0) return std::nullopt;
    return message;
  }
  void flush(milliseconds) noexcept override {}

 private:
  std::deque<Message> messages_;
  int size_;
};

std::unique_ptr<Control> control_with(std::deque<Message> messages, milliseconds deadline = 60s,
                                      int size = 3) {
  return mail_control(std::make_unique<Written>(std::move(messages), size), deadline);
}

void expect_damage(const Message& message) {
  const auto control = control_with({message});
  try {
    control->gather("", "meet");
    ADD_FAILURE() << "went on";
  } catch (const RankError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::rank_failure);
    EXPECT_EQ(error.rank(), message.from);
    EXPECT_THAT(error.what(), HasSubstr("rank 2"));
  }
  EXPECT_TRUE(control->outcome().failed());
}

TEST(Patience, EndsAtItsLimit) {
  Patience patient(50ms);
  while (!patient.over()) patient.pause();
  EXPECT_GE(patient.waited(), 50ms);
  patient.progress();
  EXPECT_TRUE(patient.over()) << "what came late does not undo that";
}

TEST(Patience, DoesNotCountWhileTheProcessIsStopped) {
  Patience patient(1s);
  std::this_thread::sleep_for(1500ms);
  patient.pause();
  EXPECT_FALSE(patient.over());
  EXPECT_LE(patient.waited(), Patience::kMostAtOnce);
  std::this_thread::sleep_for(1500ms);
  patient.pause([](milliseconds limit) { std::this_thread::sleep_for(limit); });
  EXPECT_FALSE(patient.over());
  EXPECT_LE(patient.waited(), 3 * Patience::kMostAtOnce);
}

TEST(Messages, OfThisVersionAreUnderstood) {
  const auto control = control_with({{1, Message::text, "g" + pack(std::string("meet"), "one")},
                                     {2, Message::text, "g" + pack(std::string("meet"), "two")}});
  EXPECT_EQ(control->gather("zero", "meet"), (std::vector<std::string>{"zero", "one", "two"}));
}

/// The notice of rank `from` in a roll call: it waits at "states", in a run of layer 1 with this
/// many tokens.
Message roll(int from, int run, int tokens, int place = 0) {
  return {
      from, Message::text,
      "w" + pack(std::string("0"), std::string("states"), std::to_string(place), std::string("1"),
                 std::to_string(run), pack(std::string("tokens"), std::to_string(tokens)))};
}

const Failure kOtherwise{ErrorKind::rank_failure, 1, "states", "Rank 1 sent less."};

TEST(RollCall, NamesWhatTwoRanksMeanDifferentlyByOneRun) {
  // This rank's own log does not reach back so far.
  const auto control = control_with({roll(1, 5, 4), roll(2, 5, 3)});
  try {
    control->disagree({1, 5}, kOtherwise);
    ADD_FAILURE() << "went on";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("'tokens' differs between ranks at 'states': rank 1 has 4, "
                                        "rank 2 has 3."));
  }
  EXPECT_TRUE(control->outcome().failed());
}

TEST(RollCall, WaitsForEveryRankBeforeItNamesOne) {
  const auto control =
      control_with({roll(2, 5, 4), roll(3, 5, 3), Message{.from = 0}, roll(1, 5, 4)}, 60s, 4);
  try {
    control->disagree({1, 5}, kOtherwise);
    ADD_FAILURE() << "went on";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 1 has 4, rank 3 has 3."));
  }
}

/// Two layers that ranks run in different orders: each rank finds its own run of the first one.
TEST(RollCall, ComparesTheEarliestRunThatRanksAskFor) {
  const auto control =
      control_with({roll(1, 5, 9, 4), roll(2, 5, 3, 3), Message{.from = 0}, roll(1, 5, 4, 3)}, 60s);
  try {
    control->disagree({1, 5}, kOtherwise);
    ADD_FAILURE() << "went on";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 1 has 4, rank 2 has 3."));
  }
}

TEST(RollCall, ComparesNoRanksInDifferentRuns) {
  const auto control = control_with({roll(1, 5, 4), roll(2, 6, 3)}, 200ms);
  EXPECT_THROW(control->disagree({1, 5}, kOtherwise), RankError);
}

TEST(RollCall, DuringAGatherNamesTheFieldToo) {
  const auto control = control_with({roll(1, 5, 4), roll(2, 5, 3)});
  EXPECT_THROW(control->gather("", "states"), UsageError);
}

/// Knows one run.
class OneRun final : public RunLog {
 public:
  explicit OneRun(int tokens) : tokens_(tokens) {}
  NamedValues describe(std::uint32_t) const override {
    return {{"tokens", std::to_string(tokens_)}, {"kv_len", "[1, 2]"}};
  }

 private:
  int tokens_;
};

/// Rank 1's refusal of a call with this many tokens as its run at this place.
Message refused(int place, int tokens) {
  return {1, Message::text,
          "r" + pack(std::to_string(place), std::string("no such thing"),
                     pack(std::string("tokens"), std::to_string(tokens)))};
}

/// Rank 0 is in its first run, with 4 tokens, and receives these messages there.
Failure failure_in_a_run(std::deque<Message> messages) {
  const auto control = control_with(std::move(messages), 100ms);
  const auto log = std::make_shared<OneRun>(4);
  control->begin({control->enlist(log), 1});
  try {
    control->gather("", "states");
    ADD_FAILURE() << "went on";
    return {};
  } catch (const RankError& error) {
    return {error.kind(), error.rank(), error.step(), error.what()};
  } catch (const UsageError& error) {
    return {error.kind(), -1, "", error.what()};
  }
}

TEST(Refusals, NameWhatDiffersWhereTheRankLeft) {
  const Failure failure =
      failure_in_a_run({refused(1, 5), {1, Message::left, ""}, {2, Message::left, ""}});
  EXPECT_EQ(failure.kind, ErrorKind::usage);
  EXPECT_THAT(failure.what, HasSubstr("'tokens' differs between ranks at 'states': rank 0 has 4, "
                                      "rank 1 has 5."));
  EXPECT_THAT(failure.what, HasSubstr("Rank 1 refused this call: no such thing"));
}

TEST(Refusals, NameWhatDiffersWhereTheRankStaysSilent) {
  const Failure failure = failure_in_a_run({refused(1, 5)});
  EXPECT_EQ(failure.kind, ErrorKind::usage);
  EXPECT_THAT(failure.what, HasSubstr("rank 0 has 4, rank 1 has 5."));
}

TEST(Refusals, OfWhatIsAlikeAreToldAsTheReason) {
  const Failure failure = failure_in_a_run({refused(1, 4), {1, Message::left, ""}});
  EXPECT_EQ(failure.kind, ErrorKind::rank_failure);
  EXPECT_EQ(failure.rank, 1);
  EXPECT_THAT(failure.what, HasSubstr("Rank 1 left before 'states' was done."));
  EXPECT_THAT(failure.what, HasSubstr("Rank 1 refused this call: no such thing"));
}

TEST(Refusals, OfAnotherRunSayNothing) {
  const Failure failure = failure_in_a_run({refused(2, 5), {1, Message::left, ""}});
  EXPECT_EQ(failure.kind, ErrorKind::rank_failure);
  EXPECT_THAT(failure.what, Not(HasSubstr("refused")));
}

TEST(Refusals, OfOneCallAgainAndAgainAreToldOnce) {
  auto mailbox = std::make_unique<Written>(std::deque<Message>{}, 3);
  const Written& written = *mailbox;
  const auto control = mail_control(std::move(mailbox), 1s);
  for (int i = 0; i < 5; ++i) control->refuse({{"tokens", "4"}}, "no such thing");
  EXPECT_EQ(written.posted.size(), 2u) << "one message for each of the others";
  control->refuse({{"tokens", "5"}}, "no such thing");
  EXPECT_EQ(written.posted.size(), 4u);
}

TEST(Refusals, AreTakenBackByTheRunThatFollows) {
  const Failure failure =
      failure_in_a_run({refused(1, 5), {1, Message::text, "r"}, {1, Message::left, ""}});
  EXPECT_EQ(failure.kind, ErrorKind::rank_failure);
  EXPECT_THAT(failure.what, Not(HasSubstr("refused")));

  auto mailbox = std::make_unique<Written>(std::deque<Message>{}, 2);
  const Written& written = *mailbox;
  const auto control = mail_control(std::move(mailbox), 1s);
  control->begin({1, 1});
  EXPECT_TRUE(written.posted.empty()) << "there is nothing to take back";
  control->refuse({{"tokens", "4"}}, "no such thing");
  control->begin({1, 2});
  control->begin({1, 3});
  ASSERT_EQ(written.posted.size(), 2u);
  EXPECT_EQ(written.posted[1], "r");
}

TEST(Refusals, EndNothingByThemselves) {
  const auto control = control_with({refused(1, 5),
                                     {1, Message::text, "g" + pack(std::string("meet"), "one")},
                                     {2, Message::text, "g" + pack(std::string("meet"), "two")}});
  const auto log = std::make_shared<OneRun>(4);
  control->begin({control->enlist(log), 1});
  EXPECT_EQ(control->gather("zero", "meet"), (std::vector<std::string>{"zero", "one", "two"}));
}

TEST(Messages, ThatNoRankWritesAreErrorsByName) {
  const std::string step = "meet";
  for (const std::string& body : {
           std::string(),                           // nothing at all
           std::string("x"),                        // no such kind
           std::string("g"),                        // no step
           "g" + pack(step),                        // no text
           "g" + pack(step, step, step),            // one too many
           std::string("g5:abc"),                   // cut
           std::string("g99999999999999999999:a"),  // a length beyond 64 bits
           "w" + pack(std::string("soon"), step),   // not a number
           "w" + pack(std::string(), step),         //
           "w" + pack(std::string("-1"), step),     // waited less than nothing
           "w" + pack(std::string(30, '9'), step),  // beyond 64 bits
           "w" + pack(std::string("1")),            // no step
           "f" + pack(step),                        // a failure of one word
           "f" + pack(std::string("seven"), std::string("1"), step, step),
           "f" + pack(std::string("99"), std::string("1"), step, step),  // no such kind of error
           "f" + pack(std::string("7"), std::string("3"), step, step),   // no such rank
           "f" + pack(std::string("7"), std::string("-2"), step, step),
           "r" + pack(std::string("1"), step),        // refused, and no description
           "r" + pack(std::string("0"), step, step),  // places are counted from 1
           "r" + pack(std::string("1"), step, step),  // no list of names and values
           std::string("s"),                          // of no group
           "s" + pack(std::string("1")),              // no message
           "s" + pack(std::string("0"), step),        // groups are counted from 1
           "s" + pack(std::string("one"), step),
       }) {
    SCOPED_TRACE(body);
    expect_damage({2, Message::text, body});
  }
  expect_damage({2, Message::damaged, "a frame of kind 77"});
}

/// Why messages at random may end in other errors than a RankError.
TEST(Messages, OfAFailureEndInItsOwnKind) {
  const auto ends = [](ErrorKind kind) {
    const std::string message = "f" + pack(std::to_string(static_cast<int>(kind)), std::string("1"),
                                           std::string("meet"), std::string("why"));
    return control_with({{1, Message::text, message}}, 1ms);
  };
  EXPECT_THROW(ends(ErrorKind::usage)->gather("", "meet"), UsageError);
  EXPECT_THROW(ends(ErrorKind::backend)->gather("", "meet"), BackendError);
  EXPECT_THROW(ends(ErrorKind::timeout)->gather("", "meet"), RankError);
  EXPECT_THROW(ends(ErrorKind::internal)->gather("", "meet"), RankError);
}

TEST(Messages, AtRandomEndInTypedErrors) {
  const unsigned seed = tests::fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 3000; ++round) {
    std::deque<Message> messages;
    for (std::uint64_t count = random() % 4; count > 0; --count) {
      std::string body;
      if (random() % 4) body += "gwfs"[random() % 4];
      for (std::uint64_t parts = random() % 6; parts > 0; --parts) {
        std::string part(random() % 12, '\0');
        for (char& c : part) c = static_cast<char>(random() % 3 ? '0' + random() % 10 : random());
        random() % 8 ? pack_into(body, part) : void(body += part);
      }
      messages.push_back({static_cast<int>(1 + random() % 2), Message::text, body});
    }
    const auto control = control_with(std::move(messages), 1ms);
    try {
      control->gather("", "meet");
      ADD_FAILURE() << "a timeout at the least";
    } catch (const Error& error) {
      // Messages may spell a failure, of any kind; what cannot be read is a rank's.
      const bool is_unread = std::string(error.what()).find("came damaged") != std::string::npos;
      EXPECT_TRUE(!is_unread || error.kind() == ErrorKind::rank_failure)
          << static_cast<int>(error.kind()) << ": " << error.what();
    }
  }
}

TEST(Failures, TravelAsTexts) {
  const Failure failure{ErrorKind::timeout, 3, "a step", "what 1:2 happened\n"};
  const Failure back = failure_from(to_text(failure));
  EXPECT_EQ(back.kind, failure.kind);
  EXPECT_EQ(back.rank, failure.rank);
  EXPECT_EQ(back.step, failure.step);
  EXPECT_EQ(back.what, failure.what);
}

TEST(Failures, TheFirstIsKeptWhoeverLooks) {
  for (int round = 0; round < 200; ++round) {
    Outcome outcome;
    std::atomic<bool> start{false};
    std::vector<std::string> seen(4);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&, i] {
        while (!start) std::this_thread::yield();
        try {
          if (i % 2) outcome.check();  // may be too early
          outcome.fail(
              {ErrorKind::rank_failure, i, "step", "rank " + std::to_string(i) + " failed"});
        } catch (const RankError& error) {
          seen[i] = error.what();
        }
      });
    start = true;
    for (std::thread& thread : threads) thread.join();
    // One of them throws it first, and the others say that it had come to that.
    const auto first = std::min_element(
        seen.begin(), seen.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
    for (auto what = seen.begin(); what != seen.end(); ++what)
      EXPECT_EQ(*what, what == first ? *first
                                     : "The communicator had ended before this call, at 'step': " +
                                           *first + " Make another communicator to go on.");
    EXPECT_THROW(outcome.check(), RankError);
  }
}

/// A later call throws the same type, with a text that is clearly not about that call.
TEST(Failures, AreToldAsEarlierOnesToLaterCalls) {
  const auto control = control_with({roll(1, 5, 4), roll(2, 5, 3)});
  const auto text_of = [&](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "no UsageError";
  };
  const std::string first = text_of([&] { control->disagree({1, 5}, kOtherwise); });
  EXPECT_THAT(first, ::testing::StartsWith("'tokens' differs between ranks at 'states'"));
  for (int again = 0; again < 2; ++again)
    EXPECT_THAT(text_of([&] { control->gather("", "another step"); }),
                ::testing::AllOf(::testing::StartsWith(
                                     "The communicator had ended before this call, at 'states'"),
                                 HasSubstr(first), HasSubstr("Make another communicator")));
  Outcome without_step;
  without_step.note({ErrorKind::rank_failure, 1, "", "Rank 1 gave up."});
  EXPECT_THROW(without_step.check(), RankError);
  try {
    without_step.check();
    ADD_FAILURE() << "went on";
  } catch (const RankError& error) {
    EXPECT_STREQ(error.what(),
                 "The communicator had ended before this call: Rank 1 gave up. Make another "
                 "communicator to go on.");
    EXPECT_EQ(error.rank(), 1);
  }
}

/// The requests of two of three ranks at a split, and the messages of their group that follow.
TEST(Groups, HaveMessagesOfTheirOwn) {
  const auto request = [](int color, int key, int number) {
    return pack(std::to_string(color), std::to_string(key), std::to_string(number));
  };
  const auto of_group = [](int from, int number, const std::string& message) {
    return Message{from, Message::text, std::string("s") + pack(std::to_string(number), message)};
  };
  std::shared_ptr<Control> control = control_with({
      {1, Message::text, "g" + pack(std::string("split"), request(-1, 0, 1))},
      of_group(2, 4, "g" + pack(std::string("meet"), "early")),
      of_group(2, 3, "g" + pack(std::string("meet"), "of another group")),
      {2, Message::text, "g" + pack(std::string("split"), request(7, -5, 4))},
      of_group(2, 4, "g" + pack(std::string("meet"), "later")),
      of_group(2, 4, ""),
  });
  const Group group = control->group_of(control->gather(control->split_request(7, 0), "split"));
  EXPECT_EQ(group.color, 7);
  EXPECT_EQ(group.number, 4u) << "the highest that a member asks for";
  EXPECT_EQ(group.members, (std::vector<int>{2, 0})) << "by key";
  EXPECT_EQ(group.rank, 1);
  const auto child = control->branch(group);
  EXPECT_EQ(control->split_request(0, 0), request(0, 0, 5)) << "no number comes twice";
  EXPECT_EQ(child->rank(), 1);
  EXPECT_EQ(child->size(), 2);
  EXPECT_EQ(child->name_of(0), "0 (2 of all)");
  EXPECT_EQ(child->gather("mine", "meet"), (std::vector<std::string>{"early", "mine"}));
  EXPECT_EQ(child->gather("mine", "meet"), (std::vector<std::string>{"later", "mine"}));
  try {
    child->gather("mine", "meet again");
    ADD_FAILURE() << "went on";
  } catch (const RankError& error) {
    EXPECT_EQ(error.rank(), 0);
    EXPECT_THAT(error.what(), HasSubstr("Rank 0 (2 of all) left before 'meet again' was done."));
  }
  EXPECT_FALSE(control->outcome().failed()) << "a parent lives on";
}

TEST(Groups, OfAGroupNameTheirRanksAfterTheFirst) {
  std::shared_ptr<Control> control = control_with({}, 60s, 8);
  const auto child = control->branch({.color = 0, .number = 1, .rank = 1, .members = {5, 0, 6, 2}});
  const auto grandchild = child->branch({.color = 0, .number = 2, .rank = 0, .members = {1, 2}});
  EXPECT_EQ(child->name_of(2), "2 (6 of all)");
  EXPECT_EQ(grandchild->name_of(1), "1 (6 of all)");
  EXPECT_EQ(grandchild->origins(), (std::vector<int>{0, 6}));
}

TEST(Groups, EndWithTheirParentAndItDoesNotEndWithThem) {
  std::shared_ptr<Control> control = control_with({}, 60s, 8);
  const auto first = control->branch({.color = 0, .number = 1, .rank = 1, .members = {5, 0, 6}});
  const auto second = control->branch({.color = 0, .number = 2, .rank = 0, .members = {0, 3}});
  const auto below = first->branch({.color = 0, .number = 3, .rank = 0, .members = {1, 2}});
  second->tell({ErrorKind::timeout, 1, "states", "Rank 1 is late."});
  EXPECT_TRUE(second->outcome().failed());
  EXPECT_FALSE(control->outcome().failed());
  EXPECT_FALSE(first->outcome().failed());
  control->tell({ErrorKind::rank_failure, 6, "states", "Rank 6 died."});
  const auto ends_as = [](Control& one, int rank) {
    try {
      one.outcome().check();
      ADD_FAILURE() << "went on";
    } catch (const RankError& error) {
      EXPECT_EQ(error.rank(), rank);
      EXPECT_EQ(error.step(), "states");
      EXPECT_THAT(error.what(), HasSubstr("Rank 6 died."));
    }
  };
  ends_as(*control, 6);
  ends_as(*first, 2);
  ends_as(*below, 1);
  try {
    second->outcome().check();
    ADD_FAILURE() << "went on";
  } catch (const RankError& error) {
    EXPECT_STREQ(error.what(), "Rank 1 is late.");
  }
  const auto late = control->branch({.color = 0, .number = 9, .rank = 0, .members = {0, 1}});
  ends_as(*late, -1);  // 6 is not a rank of it
}

/// A message that cannot be read ends the parent, whether it or the group receives it.
TEST(Groups, EndWhereTheParentsMessagesAreDamaged) {
  std::shared_ptr<Control> control =
      control_with({{0, Message::text, ""}, {2, Message::text, "x"}}, 60s, 3);
  const auto child = control->branch({.color = 0, .number = 1, .rank = 0, .members = {0, 1}});
  child->check("states", 0ms);
  std::this_thread::sleep_for(1ms);
  try {
    child->check("states", 0ms);
    ADD_FAILURE() << "went on";
  } catch (const RankError& error) {
    EXPECT_EQ(error.rank(), -1);
    EXPECT_THAT(error.what(), HasSubstr("What rank 2 sent cannot be read"));
  }
  EXPECT_TRUE(control->outcome().failed());
}

TEST(Failures, WithoutWordsAreErrorsToo) {
  Outcome outcome;
  outcome.note({ErrorKind::rank_failure, 1, {}, {}});
  try {
    outcome.check();
    FAIL() << "went on";
  } catch (const RankError& error) {
    EXPECT_EQ(error.rank(), 1);
    EXPECT_STRNE(error.what(), "");
  }
}

}  // namespace
}  // namespace longspan::comm
