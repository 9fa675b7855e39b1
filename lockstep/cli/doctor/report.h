// SPDX-License-Identifier: Apache-2.0
// What `lockstep doctor` found, a line each. Both of its halves use this.
#pragma once

#include <iosfwd>
#include <string>

namespace lockstep::cli {

// A warning makes training slow or some of it unusable; a problem makes it impossible.
enum class Verdict { ok, note, warning, problem };

struct Finding {
  Verdict verdict = Verdict::ok;
  std::string what, text;  // the text of all but ok says what to do
};

void print(std::ostream& out, const Finding& finding);

// Of the library that does the matrix products, by its path with all links followed.
Finding judge_blas(const std::string& path);

std::string gigabytes(double bytes);  // "7.6 GiB"

}  // namespace lockstep::cli
