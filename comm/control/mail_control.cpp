// The control plane over a mailbox: gathers, the roll call, and the groups that are split off.
#include <algorithm>
#include <deque>

#include "comm/control/diagnosis.hpp"
#include "comm/control/mailbox.hpp"
#include "comm/control/messages.hpp"
#include "comm/control/wire.hpp"

namespace longspan::comm {
namespace {

std::vector<std::string> in_turn(const NamedValues& values) {
  std::vector<std::string> list;
  for (const auto& [name, value] : values) list.insert(list.end(), {name, value});
  return list;
}

class MailControl final : public Control {
 public:
  using Family = std::vector<MailControl*>;

  /// `family` holds a communicator and all that were split from it.
  MailControl(std::unique_ptr<Mailbox> mailbox, milliseconds deadline,
              std::shared_ptr<Family> family = std::make_shared<Family>())
      : Control(deadline),
        mail_(std::move(mailbox)),
        peers_(mail_->size()),
        family_(std::move(family)) {
    family_->push_back(this);
  }

  ~MailControl() override {
    std::erase(*family_, this);
    if (outcome().failed()) mail_->abandon();
    flush();
  }

  std::shared_ptr<Control> branch(const Group& group) override;

  void flush() noexcept override {
    mail_->flush(outcome().failed() ? milliseconds(200) : deadline());
  }

  int rank() const override { return mail_->rank(); }
  int size() const override { return mail_->size(); }
  milliseconds patience() const override { return deadline() - grace(); }

  std::vector<std::string> gather(const std::string& mine, const std::string& step) override {
    outcome().check();
    post_all(GatherPart{step, mine});
    std::vector<std::string> texts(size());
    texts[rank()] = mine;
    Patience patient(patience());
    for (int missing = size() - 1; missing > 0;) {
      receive_all();
      for (int p = 0; p < size(); ++p) {
        if (p == rank() || peers_[p].counted || peers_[p].gathered.empty()) continue;
        texts[p] = open(p, step);
        --missing;
        patient.progress();
      }
      if (missing == 0) break;
      outcome().check();
      for (int p = 0; p < size(); ++p)
        if (peers_[p].gone && !peers_[p].counted) fail(diagnosis(step).departure(p));
      check_interrupt(step.c_str());
      answer_roll_calls(step.c_str(), patient.waited());
      if (patient.over()) timed_out(step.c_str(), patient.waited());
      if (!progress()) patient.pause();
    }
    for (Peer& peer : peers_) peer.counted = false;
    return texts;
  }

  void check(const char* step, milliseconds waited) override {
    const auto now = Patience::Clock::now();
    if (now - looked_ < std::chrono::microseconds(100)) return outcome().check();
    looked_ = now;
    receive_all();
    outcome().check();
    for (int p = 0; p < size(); ++p)
      if (peers_[p].gone && !peers_[p].left) fail(diagnosis(step).departure(p));
    check_interrupt(step);
    answer_roll_calls(step, waited);
  }

  [[noreturn]] void timed_out(const char* step, milliseconds waited) override {
    if (failure_domain()) failure_domain()->timed_out(step, waited);
    const AskedRun others_ask = earliest_asked({});  // of which this rank may not have begun
    call_roll(step, waited, others_ask ? others_ask : asked(run()));
    fail(diagnosis(step).verdict(echo_came_ ? std::nullopt : mail_->relay()));
  }

  [[noreturn]] void disagree(RunName run, const Failure& otherwise) override {
    if (!run) fail(otherwise);
    call_roll(otherwise.step.c_str(), milliseconds(0), asked(run));
    fail(diagnosis(otherwise.step).disagreement().value_or(otherwise));
  }

  void begin(RunName run) override {
    Control::begin(run);
    auto& refused = peers_[rank()].refused;
    if (!refused) return;
    refused.reset();
    if (!outcome().failed()) post_all(RefusalWithdrawn{});
  }

  void refuse(const NamedValues& given, const std::string& why) override {
    if (outcome().failed()) return;
    const Refusal own{place() + 1, why, in_turn(given)};
    auto& last = peers_[rank()].refused;
    if (last == own) return;  // a caller in a loop sends it once
    last = own;
    post_all(own);
  }

  void tell(const Failure& failure) noexcept override try {
    if (failure_domain()) return failure_domain()->tell(in_failure_domain(failure));
    if (outcome().failed()) return;
    outcome().note(failure);
    post_all(failure);
    mail_->flush(milliseconds(200));
  } catch (...) {
    outcome().note(failure);  // a peer that gets no message meets its own deadline
  }

 private:
  /// A mailbox over this one for a group's messages, addressed by place in the group.
  class Branch;
  struct GroupInbox {
    std::vector<int> members;
    std::deque<Mailbox::Message> received;

    /// Accepts a message from this rank of the parent. Drops it if that rank is not a member.
    void deliver(int from, Mailbox::Message::Kind kind, std::string body) {
      const auto member = std::find(members.begin(), members.end(), from);
      if (member == members.end()) return;
      received.push_back({static_cast<int>(member - members.begin()), kind, std::move(body)});
    }
    void deliver(int from, std::string body) {
      const auto kind = body.empty() ? Mailbox::Message::left : Mailbox::Message::text;
      deliver(from, kind, std::move(body));
    }
  };
  struct Early {
    int from;
    std::string body;
  };

  milliseconds grace() const {
    return std::clamp(deadline() / 4, milliseconds(1), milliseconds(5000));
  }

  Diagnosis diagnosis(const std::string& step) const {
    const AskedRun last = asked(run());
    return {*this, peers_, {step, milliseconds(0), last, in_turn(describe(last))}};
  }

  void post_all(const ControlMessage& message) {
    const std::string text = encode(message);
    for (int p = 0; p < size(); ++p)
      if (p != rank() && !peers_[p].gone) mail_->post(p, text);
  }

  void receive_all() {
    while (auto message = mail_->next()) {
      const int from = message->from;
      if (message->kind == Mailbox::Message::damaged) fail(damaged(from, message->body));
      if (message->kind != Mailbox::Message::text) {
        depart(from, message->kind);
        continue;
      }
      try {
        auto decoded = decode(message->body);
        std::visit([&](auto& content) { accept(from, std::move(content)); }, decoded);
      } catch (const Error& error) {
        fail(damaged(from, error.what()));
      }
    }
  }

  void depart(int from, Mailbox::Message::Kind how) {
    Peer& peer = peers_[from];
    if (peer.gone) return;  // it left a group before it left the group's parent
    peer.gone = true;
    peer.left = how == Mailbox::Message::left;
    for (auto& [number, inbox] : inboxes_) inbox.deliver(from, how, {});
  }

  void accept(int from, GatherPart&& part) { peers_[from].gathered.push_back(std::move(part)); }
  void accept(int from, WaitNotice&& notice) { peers_[from].waits = std::move(notice); }
  void accept(int from, Refusal&& refusal) { peers_[from].refused = std::move(refusal); }
  void accept(int from, RefusalWithdrawn&&) { peers_[from].refused.reset(); }
  void accept(int, Failure&& failure) {
    if (failure.rank >= size()) throw_damage();
    outcome().note(failure_domain() ? in_failure_domain(failure) : failure);
  }
  void accept(int from, Echo&&) {
    if (from != rank()) throw_damage();
    echo_came_ = true;
  }
  void accept(int from, GroupMessage&& message) {
    if (const auto inbox = inboxes_.find(message.number); inbox != inboxes_.end())
      inbox->second.deliver(from, std::move(message.body));
    else if (message.number >= next_number())  // others may finish a split earlier
      early_[message.number].push_back({from, std::move(message.body)});
  }

  Failure damaged(int from, const std::string& why) const {
    return {ErrorKind::rank_failure, from, "",
            "What rank " + name_of(from) + " sent cannot be read: " + why};
  }

  /// Tells the others where this rank waits and what it was given for `run`. Takes in their answers
  /// until every rank has answered for the same run, or time is up. All ranks choose the earliest
  /// run that any asks for: with layers in different orders each may have found another. No rank
  /// stops at the first difference: only ranks with the same knowledge name the same pair.
  void call_roll(const char* step, milliseconds waited, AskedRun run) {
    post_wait_notice(step, waited, earliest_asked(run));
    echo_came_ = false;
    if (mail_->relay()) mail_->post(rank(), encode(Echo{}));
    Patience patient(grace());
    while (!patient.over() && count_missing() > 0) {
      receive_all();
      answer_relatives(step, waited);
      outcome().check();
      const AskedRun own = peers_[rank()].waits->run;
      if (const AskedRun first = earliest_asked(own); first != own)
        post_wait_notice(step, waited, first);
      patient.pause();
    }
  }

  AskedRun earliest_asked(AskedRun run) const {
    for (const Peer& peer : peers_)
      if (peer.waits && peer.waits->run.is_before(run)) run = peer.waits->run;
    return run;
  }

  void post_wait_notice(const char* step, milliseconds waited, const AskedRun& run) {
    WaitNotice own{step, waited, run, in_turn(describe(run))};
    post_all(own);
    peers_[rank()].waits = std::move(own);
  }

  /// Answers where another rank calls the roll. The first rank whose time is over calls it, and
  /// every rank that receives a notice answers.
  void answer_roll_calls(const char* step, milliseconds waited) {
    for (int p = 0; p < size(); ++p)
      if (p != rank() && peers_[p].waits) timed_out(step, waited);
    answer_relatives(step, waited);
  }

  /// Answers a roll call of another communicator. A rank that waits in one communicator of a family
  /// is running: it answers in the others where the roll is called. A rank that is silent there is
  /// stuck.
  void answer(const char* step, milliseconds waited) try {
    if (outcome().failed()) return;
    receive_all();
    if (!peers_[rank()].waits &&
        std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.waits; }))
      post_wait_notice(step, waited, asked(run()));
  } catch (const Error&) {  // it has ended, and its own callers get the reason
    if (!outcome().failed()) throw;
  }

  void answer_relatives(const char* step, milliseconds waited) {
    for (MailControl* relative : *family_)
      if (relative != this) relative->answer(step, waited);
  }

  /// The ranks that have not answered for the run of this rank's own notice.
  int count_missing() const {
    const AskedRun& own = peers_[rank()].waits->run;
    return static_cast<int>(std::count_if(peers_.begin(), peers_.end(), [&](const Peer& peer) {
      return !peer.gone && (!peer.waits || own.is_before(peer.waits->run));
    }));
  }

  std::string open(int p, const std::string& step) {
    const GatherPart part = std::move(peers_[p].gathered.front());
    peers_[p].gathered.pop_front();
    peers_[p].counted = true;
    if (part.step != step)
      fail({ErrorKind::rank_failure, p, step,
            "Rank " + name_of(p) + " came to '" + part.step + "' while rank " + name_of(rank()) +
                " was at '" + step + "': " + kSameOrder});
    return part.text;
  }

  std::unique_ptr<Mailbox> mail_;
  std::vector<Peer> peers_;
  bool echo_came_ = false;  // since this rank called the roll
  Patience::Clock::time_point looked_{};
  std::shared_ptr<Family> family_;
  std::map<std::uint32_t, GroupInbox> inboxes_;       // of the groups that exist here
  std::map<std::uint32_t, std::deque<Early>> early_;  // for groups to come
};

class MailControl::Branch final : public Mailbox {
 public:
  Branch(std::shared_ptr<MailControl> parent, const Group& group)
      : parent_(std::move(parent)), group_(group), inbox_(parent_->inboxes_[group.number]) {
    inbox_.members = group_.members;
    if (auto early = parent_->early_.extract(group_.number))
      for (Early& message : early.mapped()) inbox_.deliver(message.from, std::move(message.body));
    for (const int member : group_.members)
      if (const Peer& peer = parent_->peers_[member]; peer.gone)
        inbox_.deliver(member, peer.left ? Message::left : Message::died, {});
  }
  ~Branch() override {
    try {
      for (int p = 0; p < size(); ++p)
        if (p != rank()) post(p, "");
    } catch (...) {  // without memory for a goodbye, the others run into their deadline
    }
    parent_->inboxes_.erase(group_.number);
  }

  int rank() const override { return group_.rank; }
  int size() const override { return static_cast<int>(group_.members.size()); }
  std::optional<int> relay() const override {
    const auto all = parent_->mail_->relay();
    if (!all) return std::nullopt;
    const auto place = std::find(group_.members.begin(), group_.members.end(), *all);
    return place == group_.members.end() ? -1 : static_cast<int>(place - group_.members.begin());
  }

  void post(int to, const std::string& text) override {
    const int member = group_.members[to];
    if (!parent_->peers_[member].gone)
      parent_->mail_->post(member, encode(GroupMessage{group_.number, text}));
  }

  std::optional<Message> next() override {
    std::deque<Message>& received = inbox_.received;
    if (received.empty()) try {
        parent_->receive_all();
      } catch (...) {  // a parent that failed ends this one, whose outcome has the reason
        if (!parent_->outcome().failed()) throw;
      }
    if (received.empty()) return std::nullopt;
    Message message = std::move(received.front());
    received.pop_front();
    return message;
  }

  void flush(milliseconds limit) noexcept override { parent_->mail_->flush(limit); }
  void abandon() noexcept override { distrust(); }
  void distrust() noexcept override { parent_->mail_->distrust(); }

 private:
  std::shared_ptr<MailControl> parent_;
  Group group_;
  GroupInbox& inbox_;  // the parent's, until this ends
};

std::shared_ptr<Control> MailControl::branch(const Group& group) {
  auto self = std::static_pointer_cast<MailControl>(shared_from_this());
  auto child = std::make_shared<MailControl>(std::make_unique<Branch>(std::move(self), group),
                                             deadline(), family_);
  child->set_parent(*this, group);
  std::erase_if(early_, [this](const auto& one) { return one.first < next_number(); });
  return child;
}

}  // namespace

std::unique_ptr<Control> mail_control(std::unique_ptr<Mailbox> mailbox, milliseconds deadline) {
  return std::make_unique<MailControl>(std::move(mailbox), deadline);
}

}  // namespace longspan::comm
