// SPDX-License-Identifier: Apache-2.0
// Checks for code that runs on rank threads: they throw, and run_threads carries the failure to the
// test's own thread, where GoogleTest's assertions belong.
#pragma once

#include <ATen/ATen.h>

#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>

#include "lockstep/core/error.h"

namespace lockstep::mesh {

[[noreturn]] inline void fail(const std::string& what, std::source_location where) {
  throw std::runtime_error(std::string(where.file_name()) + ":" + std::to_string(where.line()) +
                           ": " + what);
}

template <class A, class B>
void require_equal(const A& actual, const B& expected,
                   std::source_location where = std::source_location::current()) {
  if (!(actual == expected)) fail("values differ", where);
}

inline void require_same(const at::Tensor& actual, const at::Tensor& expected,
                         std::source_location where = std::source_location::current()) {
  if (actual.sizes() == expected.sizes() && actual.dtype() == expected.dtype() &&
      at::equal(actual, expected)) {
    return;
  }
  std::ostringstream text;
  text << "got " << actual << " instead of " << expected;
  fail(text.str(), where);
}

// The call must throw a ConfigError whose message has these facts (tests/support/says.h).
template <class Call>
void require_refused(Call call, const std::string& facts,
                     std::source_location where = std::source_location::current()) {
  try {
    call();
  } catch (const ConfigError& error) {
    const std::string message = error.what();
    const std::string missing = test::missing_fact(message, facts);
    if (missing.empty()) return;
    fail("the message is '" + message + "', without '" + missing + "'", where);
  }
  fail("nothing was thrown, expected '" + facts + "'", where);
}

}  // namespace lockstep::mesh
