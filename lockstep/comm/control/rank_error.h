// SPDX-License-Identifier: Apache-2.0
// Errors on their way from one rank to the others. Private to comm.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <optional>
#include <string>

namespace lockstep::comm::detail {

// An error as text, from which another rank throws one of the same class.
struct RankError {
  enum class Kind : char {
    peer_lost = 'L',
    timeout = 'T',
    mismatch = 'M',
    damaged = 'D',
    comm = 'E',  // any other CommError
    checkpoint = 'C',
    config = 'I',
    other = '-',
  };

  Kind kind = Kind::other;
  int rank = -1;  // the rank that failed, that was lost, or whose data was damaged
  std::string message = {};

  // `rank` is that of the caller.
  static RankError of(const std::exception_ptr& error, int rank);
  static RankError parse(const std::string& text);
  std::string to_text() const;

  bool is_comm() const;
  [[noreturn]] void raise() const;
};

// What a rank sends in an exchange of texts: its text, or why it has none, so that a rank that
// fails does not leave the others waiting.
class Contribution {
 public:
  // Calls `make` and keeps what it throws, of which at most `most` bytes are sent.
  Contribution(int rank, const std::function<std::string()>& make, size_t most = std::string::npos);

  const std::string& text() const { return text_; }  // to be sent
  void throw_if_failed() const;

  // Of a text that another rank has sent: why it failed, if it has; else what `make` returned
  // there.
  static std::optional<RankError> error_in(const std::string& text);
  static std::string value_in(const std::string& text);

 private:
  std::string text_;
  std::exception_ptr failure_;
};

}  // namespace lockstep::comm::detail
