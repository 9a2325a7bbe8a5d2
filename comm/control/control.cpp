// The control plane over a mailbox. A letter's first byte says what it is:
//     g step text      this rank's part of a gather
//     w waited step place layer run description
//                      I wait here and still run (the roll call), and this is what I mean by the
//                      run that the roll is called for (AskedRun)
//     r place why description
//                      I refused the call that would have been my run of this place; without
//                      anything: I called again, and have begun that run
//     f failure        the communicator has ended, and why
//     e                to oneself, through the process that passes letters on: that it does so
//     s number letter  a letter of the group of this number, which was split from this
//                      communicator; an empty one is the last: this rank has left the group
#include "comm/control/control.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <limits>

#include "comm/control/wire.hpp"

namespace longspan::comm {
namespace {

constexpr const char* kSameOrder = "every rank must make the same calls in the same order.";
/// No letter has as many milliseconds or runs.
constexpr long long kMostNumber = 1'000'000'000'000;

std::string seconds(milliseconds time) { return fmt::format("{:g} s", time.count() / 1000.0); }

class MailControl final : public Control {
 public:
  using Family = std::vector<MailControl*>;

  /// `family` holds all that were split from one communicator, and that one.
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
    if (fate().failed()) mail_->abandon();
    flush();
  }

  std::shared_ptr<Control> branch(const Group& group) override;

  void flush() noexcept override { mail_->flush(fate().failed() ? milliseconds(200) : deadline()); }

  int rank() const override { return mail_->rank(); }
  int size() const override { return mail_->size(); }
  milliseconds patience() const override { return deadline() - grace(); }

  std::vector<std::string> gather(const std::string& mine, const std::string& step) override {
    fate().check();
    post_all('g', pack(step, mine));
    std::vector<std::string> texts(size());
    texts[rank()] = mine;
    Patience patient(patience());
    for (int missing = size() - 1; missing > 0;) {
      take();
      for (int p = 0; p < size(); ++p) {
        if (p == rank() || peers_[p].counted || peers_[p].gathered.empty()) continue;
        texts[p] = open(p, step);
        --missing;
        patient.progress();
      }
      if (missing == 0) break;
      fate().check();
      for (int p = 0; p < size(); ++p)
        if (peers_[p].gone && !peers_[p].counted) fail(departure(p, step));
      heed(step.c_str());
      listen(step.c_str(), patient.waited());
      if (patient.over()) timed_out(step.c_str(), patient.waited());
      if (!move_data()) patient.pause();
    }
    for (Peer& peer : peers_) peer.counted = false;
    return texts;
  }

  void check(const char* step, milliseconds waited) override {
    const auto now = Patience::Clock::now();
    if (now - looked_ < std::chrono::microseconds(100)) return fate().check();
    looked_ = now;
    take();
    fate().check();
    for (int p = 0; p < size(); ++p)
      if (peers_[p].gone && !peers_[p].left) fail(departure(p, step));
    heed(step);
    listen(step, waited);
  }

  [[noreturn]] void timed_out(const char* step, milliseconds waited) override {
    if (whole()) whole()->timed_out(step, waited);
    call_roll(step, waited, asked(run()));
    fail(verdict(step));
  }

  [[noreturn]] void disagree(RunName run, const Failure& otherwise) override {
    if (!run) fail(otherwise);
    call_roll(otherwise.step.c_str(), milliseconds(0), asked(run));
    fail(disagreement(otherwise.step).value_or(otherwise));
  }

  void begin(RunName run) override {
    Control::begin(run);
    auto& refused = peers_[rank()].refused;
    if (!refused) return;
    refused.reset();
    if (!fate().failed()) post_all('r', "");
  }

  void refuse(const NamedValues& given, const std::string& why) override {
    if (fate().failed()) return;
    const Refused own{place() + 1, why, in_turn(given)};
    auto& last = peers_[rank()].refused;
    if (last == own) return;  // who calls in a loop tells it once
    last = own;
    post_all('r', pack(std::to_string(own.place), own.why, pack_all(own.given)));
  }

  void tell(const Failure& failure) noexcept override try {
    if (whole()) return whole()->tell(in_whole(failure));
    if (fate().failed()) return;
    fate().note(failure);
    post_all('f', to_text(failure));
    mail_->flush(milliseconds(200));
  } catch (...) {
    fate().note(failure);  // a peer that cannot be told meets its own deadline
  }

 private:
  /// A mailbox over this one for a group's letters, by its members' places in the group.
  class Branch;
  struct Line {
    std::vector<int> members;
    std::deque<Mailbox::Letter> came;
  };
  struct Early {
    int from;
    std::string text;
  };

  struct Waits {
    std::string step;
    milliseconds waited;
    AskedRun run = {};
    std::vector<std::string> means = {};  // names and values of the run, in turn
  };
  struct Refused {
    std::uint64_t place;
    std::string why;
    std::vector<std::string> given;  // names and values, in turn

    bool operator==(const Refused&) const = default;
  };
  struct Gathered {
    std::string step;
    std::string text;
  };
  struct Peer {
    std::deque<Gathered> gathered;  // letters of gathers that have not been opened
    bool counted = false;           // in the gather that runs now
    bool gone = false;
    bool left = false;  // gone, but it said so
    std::optional<Waits> waits;
    std::optional<Refused> refused;  // the last call, where it refused that
  };

  milliseconds grace() const {
    return std::clamp(deadline() / 4, milliseconds(1), milliseconds(5000));
  }

  void post_all(char kind, const std::string& body) {
    std::string text(1, kind);
    text += body;
    for (int p = 0; p < size(); ++p)
      if (p != rank() && !peers_[p].gone) mail_->post(p, text);
  }

  void take() {
    while (auto letter = mail_->next()) {
      Peer& peer = peers_[letter->from];
      if (letter->kind == Mailbox::Letter::damaged) fail(damaged(letter->from, letter->body));
      if (letter->kind != Mailbox::Letter::text) {
        if (peer.gone) continue;  // it left a group before it left what the group was split from
        peer.gone = true;
        peer.left = letter->kind == Mailbox::Letter::left;
        for (auto& [number, line] : lines_) give(line, letter->from, letter->kind, {});
        continue;
      }
      try {
        hear(letter->from, letter->body);
      } catch (const Error& error) {
        fail(damaged(letter->from, error.what()));
      }
    }
  }

  /// Says where this rank waits and what it was given for `run`, and hears what the others say,
  /// until everyone has spoken or the time for it is over. A rank that stopped at the first
  /// difference might name another pair than its peers do: only ranks that heard the same say the
  /// same.
  void call_roll(const char* step, milliseconds waited, AskedRun run) {
    for (const Peer& peer : peers_)
      if (peer.waits && peer.waits->run) run = peer.waits->run;  // it is asked for already
    say_where(step, waited, run);
    echo_came_ = false;
    if (mail_->relay()) mail_->post(rank(), "e");
    Patience patient(grace());
    while (!patient.over() && count_silent() > 0) {
      take();
      answer_relatives(step, waited);
      fate().check();
      patient.pause();
    }
  }

  void say_where(const char* step, milliseconds waited, const AskedRun& run) {
    Waits own{step, waited, run, in_turn(describe(run))};
    post_all('w', pack(std::to_string(waited.count()), own.step, std::to_string(run.place),
                       std::to_string(run.name.layer), std::to_string(run.name.run),
                       pack_all(own.means)));
    peers_[rank()].waits = std::move(own);
  }

  /// Answers a roll call of another communicator. A rank that waits in one communicator of a family
  /// runs: where the roll is called in another one it says so, and the rank that is silent there is
  /// the one that is stuck.
  void answer(const char* step, milliseconds waited) try {
    if (fate().failed()) return;
    take();
    if (!peers_[rank()].waits &&
        std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.waits; }))
      say_where(step, waited, asked(run()));
  } catch (const Error&) {  // that one has ended, and says so to whoever asks it
    if (!fate().failed()) throw;
  }

  void answer_relatives(const char* step, milliseconds waited) {
    for (MailControl* relative : *family_)
      if (relative != this) relative->answer(step, waited);
  }

  static std::vector<std::string> in_turn(const NamedValues& values) {
    std::vector<std::string> list;
    for (const auto& [name, value] : values) list.insert(list.end(), {name, value});
    return list;
  }

  void give(Line& line, int from, Mailbox::Letter::Kind kind, std::string body) {
    const auto member = std::find(line.members.begin(), line.members.end(), from);
    if (member == line.members.end()) return;
    line.came.push_back({static_cast<int>(member - line.members.begin()), kind, std::move(body)});
  }
  void give(Line& line, int from, std::string text) {
    const auto kind = text.empty() ? Mailbox::Letter::left : Mailbox::Letter::text;
    give(line, from, kind, std::move(text));
  }

  /// Finds two ranks that were given different things for the same run; nothing while none are
  /// known.
  std::optional<Failure> disagreement(const std::string& step) const {
    for (int p = 0; p < size(); ++p)
      for (int q = p + 1; q < size(); ++q)
        if (const auto text = difference(p, q, step))
          return Failure{ErrorKind::usage, q, step, *text};
    return std::nullopt;
  }
  std::optional<std::string> difference(int p, int q, const std::string& step) const {
    const auto &one = peers_[p].waits, &other = peers_[q].waits;
    const bool known =
        one && other && one->run == other->run && !one->means.empty() && !other->means.empty();
    return known ? comm::difference(one->means, name_of(p), other->means, name_of(q), step)
                 : std::nullopt;
  }

  /// Takes in a letter. Throws an internal Error for what no rank of this version writes.
  void hear(int from, const std::string& letter) {
    Peer& peer = peers_[from];
    if (letter.empty()) throw_damage();
    const std::string body = letter.substr(1);
    switch (letter.front()) {
      case 'g': {
        auto parts = unpack(body, 2);
        peer.gathered.push_back({std::move(parts[0]), std::move(parts[1])});
        break;
      }
      case 'w': {
        const auto parts = unpack(body, 6);
        const auto number = [](const std::string& text) {
          return static_cast<std::uint32_t>(
              number_from(text, 0, std::numeric_limits<std::uint32_t>::max()));
        };
        peer.waits = Waits{parts[1],
                           milliseconds(number_from(parts[0], 0, kMostNumber)),
                           {static_cast<std::uint64_t>(number_from(parts[2], 0, kMostNumber)),
                            {number(parts[3]), number(parts[4])}},
                           unpack(parts[5])};
        break;
      }
      case 'r': {
        if (body.empty()) {
          peer.refused.reset();
          break;
        }
        auto parts = unpack(body, 3);
        peer.refused = Refused{static_cast<std::uint64_t>(number_from(parts[0], 1, kMostNumber)),
                               printable(parts[1], 1000), unpack(parts[2])};
        break;
      }
      case 'f': {
        const Failure failure = failure_from(body);
        if (failure.rank >= size()) throw_damage();
        fate().note(whole() ? in_whole(failure) : failure);
        break;
      }
      case 'e':
        if (from != rank()) throw_damage();
        echo_came_ = true;
        break;
      case 's': {
        auto parts = unpack(body, 2);
        const auto number = static_cast<std::uint32_t>(
            number_from(parts[0], 1, std::numeric_limits<std::uint32_t>::max()));
        if (const auto line = lines_.find(number); line != lines_.end())
          give(line->second, from, std::move(parts[1]));
        else if (number >= next_number())  // others may be through with a split earlier
          early_[number].push_back({from, std::move(parts[1])});
        break;
      }
      default:
        throw_damage();
    }
  }

  Failure damaged(int from, const std::string& why) const {
    return {ErrorKind::rank_failure, from, "",
            fmt::format("What rank {} sent cannot be read: {}", name_of(from), why)};
  }

  /// Answers where another rank calls the roll: the first whose time is over calls it, and everyone
  /// who hears it answers.
  void listen(const char* step, milliseconds waited) {
    for (int p = 0; p < size(); ++p)
      if (p != rank() && peers_[p].waits) timed_out(step, waited);
    answer_relatives(step, waited);
  }

  std::string open(int p, const std::string& step) {
    const Gathered letter = std::move(peers_[p].gathered.front());
    peers_[p].gathered.pop_front();
    peers_[p].counted = true;
    if (letter.step != step)
      fail({ErrorKind::rank_failure, p, step,
            fmt::format("Rank {} came to '{}' while rank {} was at '{}': {}", name_of(p),
                        letter.step, name_of(rank()), step, kSameOrder)});
    return letter.text;
  }

  Failure departure(int p, const std::string& step) const {
    return unless_refused({ErrorKind::rank_failure, p, step,
                           fmt::format("Rank {} {} before '{}' was done. Its own output says why.",
                                       name_of(p), peers_[p].left ? "left" : "died", step)});
  }

  /// The failure of a rank that does not come. Where it refused its call of the run that others
  /// are in, the failure says so, and what differs between the two calls.
  Failure unless_refused(Failure absent) const {
    const auto& refused = peers_[absent.rank].refused;
    if (!refused) return absent;
    int witness = rank();
    AskedRun run = asked(this->run());
    std::vector<std::string> means = in_turn(describe(run));
    for (int p = 0; p < size(); ++p) {  // in a roll call every rank takes the same one
      const auto& waits = peers_[p].waits;
      if (p == absent.rank || !waits || waits->means.empty()) continue;
      witness = p, run = waits->run, means = waits->means;
      break;
    }
    if (run.place != refused->place) return absent;
    means.resize(std::min(means.size(), refused->given.size()));  // it was refused before the rest
    const auto text = comm::difference(means, name_of(witness), refused->given,
                                       name_of(absent.rank), absent.step);
    if (text) absent = {ErrorKind::usage, absent.rank, absent.step, *text};
    absent.what +=
        fmt::format(" Rank {} refused this call: {}", name_of(absent.rank), refused->why);
    return absent;
  }

  int count_silent() const {
    return static_cast<int>(std::count_if(
        peers_.begin(), peers_.end(), [](const Peer& peer) { return !peer.waits && !peer.gone; }));
  }

  /// Names the rank to blame, from what the roll call heard. Every rank that heard the same says
  /// the same.
  Failure verdict(const std::string& step) const {
    if (const auto found = disagreement(step)) return *found;
    const auto find = [&](auto wrong) {
      const auto peer = std::find_if(peers_.begin(), peers_.end(), wrong);
      return peer == peers_.end() ? -1 : static_cast<int>(peer - peers_.begin());
    };
    const auto late = [&](int p, const std::string& how) {
      return Failure{ErrorKind::timeout, p, step,
                     fmt::format("Rank {} {}. It may be stopped, stuck or much slower; "
                                 "LONGSPAN_DEADLINE_S sets the deadline.",
                                 name_of(p), how)};
    };

    if (const int p = find([](const Peer& peer) { return peer.gone && !peer.waits; }); p >= 0)
      return departure(p, step);
    const int silent = find([](const Peer& peer) { return !peer.waits; });
    if (const auto relay = mail_->relay(); relay && silent >= 0 && !echo_came_)
      return {
          ErrorKind::timeout, *relay, step,
          fmt::format("Rank {} did not come to '{}' within the deadline of {}. It passes on what "
                      "ranks tell each other, and nothing comes through it, so nothing is known "
                      "of the others. It may be stopped; LONGSPAN_DEADLINE_S sets the deadline.",
                      *relay >= 0 ? name_of(*relay) : "0 of all", step, seconds(deadline()))};
    if (const int p = silent; p >= 0) {
      std::vector<std::string> others;
      for (int other = p + 1; other < size(); ++other)
        if (!peers_[other].waits) others.push_back(name_of(other));
      return unless_refused(late(
          p,
          fmt::format(
              "did not come to '{}' within the deadline of {}{}", step, seconds(deadline()),
              others.empty() ? "" : fmt::format(" (nor did ranks {})", fmt::join(others, ", ")))));
    }
    const std::string& usual = usual_step();
    if (const int p = find([&](const Peer& peer) { return peer.waits->step != usual; }); p >= 0)
      return unless_refused({ErrorKind::rank_failure, p, step,
                             fmt::format("Rank {} waits at '{}' while others wait at '{}': {}",
                                         name_of(p), peers_[p].waits->step, usual, kSameOrder)});
    const auto [last, first] = std::minmax_element(
        peers_.begin(), peers_.end(),
        [](const Peer& a, const Peer& b) { return a.waits->waited < b.waits->waited; });
    if (last->waits->waited < first->waits->waited / 2)
      return late(static_cast<int>(last - peers_.begin()),
                  fmt::format("came to '{}' too late: rank {} had waited for {}", step,
                              name_of(static_cast<int>(first - peers_.begin())),
                              seconds(first->waits->waited)));
    return {ErrorKind::timeout, -1, step,
            fmt::format("'{}' was not done within the deadline of {}, although every rank answers: "
                        "the exchange itself does not finish.",
                        step, seconds(deadline()))};
  }

  /// The step where most ranks wait; of equals the lowest rank's.
  const std::string& usual_step() const {
    const auto votes = [&](const Peer& candidate) {
      return std::count_if(peers_.begin(), peers_.end(), [&](const Peer& peer) {
        return peer.waits->step == candidate.waits->step;
      });
    };
    return std::max_element(peers_.begin(), peers_.end(),
                            [&](const Peer& a, const Peer& b) { return votes(a) < votes(b); })
        ->waits->step;
  }

  std::unique_ptr<Mailbox> mail_;
  std::vector<Peer> peers_;
  bool echo_came_ = false;  // since this rank called the roll
  Patience::Clock::time_point looked_{};
  std::shared_ptr<Family> family_;
  std::map<std::uint32_t, Line> lines_;               // of the groups that exist here
  std::map<std::uint32_t, std::deque<Early>> early_;  // for groups that will be
};

class MailControl::Branch final : public Mailbox {
 public:
  Branch(std::shared_ptr<MailControl> parent, const Group& group)
      : parent_(std::move(parent)), group_(group) {
    Line& line = parent_->lines_[group_.number];
    line.members = group_.members;
    if (auto early = parent_->early_.extract(group_.number))
      for (Early& letter : early.mapped()) parent_->give(line, letter.from, std::move(letter.text));
    for (const int member : group_.members)
      if (const Peer& peer = parent_->peers_[member]; peer.gone)
        parent_->give(line, member, peer.left ? Letter::left : Letter::died, {});
  }
  ~Branch() override {
    try {
      for (int p = 0; p < size(); ++p)
        if (p != rank()) post(p, "");
    } catch (...) {  // without memory for a goodbye, the others meet their deadline
    }
    parent_->lines_.erase(group_.number);
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
    if (parent_->peers_[member].gone) return;
    std::string letter(1, 's');
    letter += pack(std::to_string(group_.number), text);
    parent_->mail_->post(member, letter);
  }

  std::optional<Letter> next() override {
    std::deque<Letter>& came = parent_->lines_[group_.number].came;
    if (came.empty()) try {
        parent_->take();
      } catch (...) {  // a parent that failed ends this one, and its fate says why
        if (!parent_->fate().failed()) throw;
      }
    if (came.empty()) return std::nullopt;
    Letter letter = std::move(came.front());
    came.pop_front();
    return letter;
  }

  void flush(milliseconds limit) noexcept override { parent_->mail_->flush(limit); }
  void abandon() noexcept override { distrust(); }
  void distrust() noexcept override { parent_->mail_->distrust(); }

 private:
  std::shared_ptr<MailControl> parent_;
  Group group_;
};

std::shared_ptr<Control> MailControl::branch(const Group& group) {
  auto self = std::static_pointer_cast<MailControl>(shared_from_this());
  auto child = std::make_shared<MailControl>(std::make_unique<Branch>(std::move(self), group),
                                             deadline(), family_);
  child->descend(*this, group);
  std::erase_if(early_, [this](const auto& one) { return one.first < next_number(); });
  return child;
}

class SelfControl final : public Control {
 public:
  using Control::Control;
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::vector<std::string> gather(const std::string& mine, const std::string&) override {
    fate().check();
    return {mine};
  }
  void check(const char*, milliseconds) override { fate().check(); }
  [[noreturn]] void timed_out(const char* step, milliseconds) override {
    fate().fail({ErrorKind::timeout, 0, step,
                 fmt::format("'{}' was not done within the deadline of {}; LONGSPAN_DEADLINE_S "
                             "sets it.",
                             step, seconds(deadline()))});
  }
  void tell(const Failure& failure) noexcept override { fate().note(failure); }

  std::shared_ptr<Control> branch(const Group& group) override {
    auto child = std::make_shared<SelfControl>(deadline());
    child->descend(*this, group);
    return child;
  }
};

}  // namespace

std::string Control::name_of(int rank) const {
  if (origins_.empty() || rank < 0 || rank >= size()) return std::to_string(rank);
  return fmt::format("{} ({} of all)", rank, origins_[rank]);
}

std::string Control::wish(int color, int key) const {
  return pack(std::to_string(color), std::to_string(key), std::to_string(next_number()));
}

Group Control::group_of(const std::vector<std::string>& wishes) const {
  constexpr long long kLowest = std::numeric_limits<int>::min(),
                      kHighest = std::numeric_limits<int>::max();
  struct Wish {
    long long color, key;
    std::uint32_t number;
  };
  std::vector<Wish> all;
  for (const std::string& text : wishes) {
    const auto parts = unpack(text, 3);
    all.push_back({number_from(parts[0], kLowest, kHighest),
                   number_from(parts[1], kLowest, kHighest),
                   static_cast<std::uint32_t>(
                       number_from(parts[2], 1, std::numeric_limits<std::uint32_t>::max()))});
  }
  const Wish& own = all[rank()];
  if (own.color < 0) return {};
  Group group{.color = static_cast<int>(own.color)};
  for (int p = 0; p < size(); ++p) {
    if (all[p].color != own.color) continue;
    group.members.push_back(p);
    group.number = std::max(group.number, all[p].number);
  }
  std::stable_sort(group.members.begin(), group.members.end(),
                   [&](int a, int b) { return all[a].key < all[b].key; });
  group.rank = static_cast<int>(std::find(group.members.begin(), group.members.end(), rank()) -
                                group.members.begin());
  return group;
}

void Control::descend(Control& parent, const Group& group) {
  for (const int member : group.members)
    origins_.push_back(parent.origins_.empty() ? member : parent.origins_[member]);
  parent_ = parent.weak_from_this();
  members_ = group.members;
  next_number_ = parent.next_number_;
  *next_number_ = group.number + 1;
  parent.fate_->bequeath(fate_, group.members);
}

void Control::end_with_parent() {
  whole_ = parent_.lock();
  if (whole_) fate_ = whole_->fate_;
}

std::optional<std::string> difference(const std::vector<std::string>& one,
                                      const std::string& rank_of_one,
                                      const std::vector<std::string>& other,
                                      const std::string& rank_of_other, const std::string& step) {
  if (one == other) return std::nullopt;
  std::size_t i = 0;
  for (; i + 1 < std::min(one.size(), other.size()) && one[i] == other[i]; i += 2) {
    if (one[i + 1] == kNotKnown || other[i + 1] == kNotKnown) continue;
    if (other[i + 1] != one[i + 1])
      return fmt::format(
          "'{}' differs between ranks at '{}': rank {} has {}, rank {} has {}. Give "
          "every rank the same value, and the same calls in the same order.",
          one[i], step, rank_of_one, one[i + 1], rank_of_other, other[i + 1]);
  }
  if (i == one.size() && i == other.size()) return std::nullopt;
  return fmt::format(
      "The lists of arguments differ between rank {} and rank {} at '{}': is every "
      "rank of the same longspan version?",
      rank_of_one, rank_of_other, step);
}

Failure gave_up(const Control& control, const std::string& why) {
  return {
      ErrorKind::rank_failure, control.rank(), "",
      fmt::format("Rank {} gave up: {}", control.name_of(control.rank()), printable(why, 1000))};
}

std::unique_ptr<Control> self_control(milliseconds deadline) {
  return std::make_unique<SelfControl>(deadline);
}

std::unique_ptr<Control> mail_control(std::unique_ptr<Mailbox> mailbox, milliseconds deadline) {
  return std::make_unique<MailControl>(std::move(mailbox), deadline);
}

}  // namespace longspan::comm
