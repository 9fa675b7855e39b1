// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/watch.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <fstream>
#include <iostream>

#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/flight/culprit.h"
#include "lockstep/flight/slow_ranks.h"
#include "lockstep/report/findings.h"
#include "lockstep/report/run.h"

namespace lockstep::report {
namespace {

constexpr int kPauseMs = 500;
constexpr size_t kTail = 128 << 10;  // bytes of a file that are read
constexpr size_t kStepsShown = 6;

// The last lines of a file that are JSON objects.
std::vector<io::Json> last_lines(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto size = static_cast<int64_t>(file.tellg());
  std::vector<io::Json> lines;
  if (size <= 0) return lines;
  const int64_t first = std::max<int64_t>(0, size - static_cast<int64_t>(kTail));
  file.seekg(first);
  std::string line;
  if (first > 0) std::getline(file, line);
  while (std::getline(file, line)) {
    io::Json json = io::parse_json_line(line);
    if (json.is_object()) lines.push_back(std::move(json));
  }
  return lines;
}

double value_of(const io::Json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_number() ? found->get<double>() : kNone;
}

std::string cut(std::string text, int columns) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = ' ';
  }
  if (static_cast<int>(text.size()) > columns)
    text.resize(static_cast<size_t>(std::max(columns, 0)));
  return text;
}

std::vector<flight::Flight> flights_of(const io::Json& start) {
  std::vector<flight::Flight> flights;
  const auto ranks = start.find("ranks");
  if (ranks == start.end() || !ranks->is_array()) return flights;
  for (const io::Json& rank : *ranks) {
    if (!rank.is_object() || rank.value("host", "") != host_name()) continue;
    if (auto flight = flight::read_process(rank.value("pid", -1)))
      flights.push_back(std::move(*flight));
  }
  std::ranges::sort(flights, {}, &flight::Flight::rank);
  return flights;
}

// The terminal as it was comes back when it goes out of scope.
class RawTerminal {
 public:
  RawTerminal() {
    is_terminal_ = isatty(STDIN_FILENO) == 1 && tcgetattr(STDIN_FILENO, &before_) == 0;
    if (is_terminal_) {
      termios raw = before_;
      raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    }
    std::cout << "\x1b[?1049h\x1b[?25l" << std::flush;  // another screen, no cursor
  }
  ~RawTerminal() {
    if (is_terminal_) tcsetattr(STDIN_FILENO, TCSANOW, &before_);
    std::cout << "\x1b[?25h\x1b[?1049l" << std::flush;
  }
  RawTerminal(const RawTerminal&) = delete;
  RawTerminal& operator=(const RawTerminal&) = delete;

  // Whether q was pressed within the time.
  bool quits(int milliseconds) const {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (poll(&input, is_terminal_ ? 1 : 0, milliseconds) <= 0) return false;
    char key = 0;
    return ::read(STDIN_FILENO, &key, 1) <= 0 || key == 'q' || key == 'Q' || key == 3;
  }

 private:
  termios before_{};
  bool is_terminal_ = false;
};

volatile std::sig_atomic_t stopped = 0;

}  // namespace

std::string watch_frame(const std::string& folder, int columns, int rows) {
  std::vector<std::string> lines;
  const auto metrics = last_lines(folder + "/metrics.jsonl");
  const auto starts = last_lines(folder + "/environment.jsonl");
  const auto events = last_lines(folder + "/events.jsonl");
  // Where there are many events the start is not among the last.
  const bool moves = !metrics.empty() || events.size() > 1;
  std::string state = moves ? "running" : "starting";
  for (const io::Json& event : events) {
    const std::string kind = event.value("event", "");
    if (kind == "started") state = "running";
    if (kind == "finished" || kind == "stopped" || kind == "failed") state = kind;
  }
  std::vector<const io::Json*> steps;
  for (const io::Json& line : metrics) {
    if (line.contains("loss")) steps.push_back(&line);
  }
  std::string head = format("{}  {}", folder, state);
  if (!steps.empty()) {
    const io::Json& last = *steps.back();
    head += format("  step {:.0f}  loss {:.4f}  {} tokens/s", value_of(last, "step"),
                   value_of(last, "loss"), short_count(value_of(last, "tokens_per_s")));
  }
  lines.push_back(head);
  lines.push_back("");
  lines.push_back(format("{:>9}{:>10}{:>10}{:>10}{:>10}{:>8}{:>8}{:>8}", "step", "loss", "grad",
                         "step ms", "compute", "comm", "bubble", "stall"));
  for (size_t i = steps.size() - std::min(steps.size(), kStepsShown); i < steps.size(); ++i) {
    const io::Json& line = *steps[i];
    const io::Json split = line.value("split", io::Json::object());
    lines.push_back(format("{:>9.0f}{:>10.4f}{:>10.3f}{:>10.1f}{:>10.1f}{:>8.1f}{:>8.1f}{:>8.1f}",
                           value_of(line, "step"), value_of(line, "loss"),
                           value_of(line, "grad_norm"), value_of(line, "step_ms"),
                           value_of(split, "compute_ms"), value_of(split, "communication_ms"),
                           value_of(split, "bubble_ms"), value_of(split, "stall_ms")));
  }
  lines.push_back("");
  // The same rule as the launcher's, over the steps that were read.
  flight::SlowRanks judge;
  std::vector<flight::SlowRank> slow;
  std::vector<double> busy;
  for (const io::Json* const line : steps) {
    const auto found = line->find("busy_ms");
    if (found == line->end() || !found->is_array()) continue;
    std::vector<int64_t> times;
    busy.clear();
    for (const io::Json& each : *found) {
      busy.push_back(each.is_number() ? each.get<double>() : 0);
      times.push_back(static_cast<int64_t>(busy.back() * 1e6));
    }
    slow = judge.judge(times);
  }
  const auto flights = starts.empty() ? std::vector<flight::Flight>{} : flights_of(starts.back());
  for (const flight::SlowRank& rank : slow)
    lines.push_back(format(
        "rank {} is slow: {:.0f} ms of computation in a step, the others {:.0f} ms", rank.rank,
        static_cast<double>(rank.busy_ns) / 1e6, static_cast<double>(rank.usual_ns) / 1e6));
  if (const auto culprit = flight::find_culprit(flights, /*patient=*/true))
    lines.push_back(culprit->text);
  const double most = busy.empty() ? 0 : *std::ranges::max_element(busy);
  const size_t ranks = std::max(busy.size(), flights.size());
  for (size_t rank = 0; rank < ranks && static_cast<int>(lines.size()) < rows - 1; ++rank) {
    const auto flight = std::ranges::find(flights, static_cast<int>(rank), &flight::Flight::rank);
    const double mine = rank < busy.size() ? busy[rank] : 0;
    const auto bar = static_cast<size_t>(most > 0 ? std::lround(mine / most * 20) : 0);
    lines.push_back(format("rank {:<4}{:>8.1f} ms {}{} {}", rank, mine, std::string(bar, '#'),
                           std::string(20 - bar, '.'),
                           flight == flights.end() ? "" : flight->doing()));
  }
  std::string frame;
  for (size_t i = 0; i < lines.size() && static_cast<int>(i) < rows - 1; ++i)
    frame += cut(lines[i], columns) + "\n";
  return frame;
}

void watch(const std::string& folder) {
  if (isatty(STDOUT_FILENO) != 1) {
    std::cout << watch_frame(folder, 200, 1000);
    return;
  }
  struct sigaction action {};
  action.sa_handler = [](int) { stopped = 1; };
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  std::string last;
  {
    const RawTerminal terminal;
    while (stopped == 0) {
      winsize size{};
      if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) size = {24, 80, 0, 0};
      last = watch_frame(folder, size.ws_col - 1, size.ws_row);
      std::string text = "\x1b[H";
      for (const char c : last) text += c == '\n' ? std::string("\x1b[K\r\n") : std::string(1, c);
      std::cout << text + "\x1b[J" << cut("q quits", size.ws_col - 1) << std::flush;
      const std::string head = last.substr(0, last.find('\n'));
      if (head.find("  finished") != std::string::npos ||
          head.find("  stopped") != std::string::npos || head.find("  failed") != std::string::npos)
        break;
      if (terminal.quits(kPauseMs)) break;
    }
  }
  std::cout << last << std::flush;
}

}  // namespace lockstep::report
