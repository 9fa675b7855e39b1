// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/doctor/report.h"

#include <array>
#include <filesystem>
#include <ostream>
#include <string_view>

#include "lockstep/core/format.h"

namespace lockstep::cli {

void print(std::ostream& out, const Finding& finding) {
  constexpr std::array<std::string_view, 4> kNames = {"ok", "note", "warning", "PROBLEM"};
  out << format("{:<8} {:<15} {}\n", kNames.at(static_cast<size_t>(finding.verdict)), finding.what,
                finding.text)
      << std::flush;
}

Finding judge_blas(const std::string& path) {
  const auto has = [&](const char* part) { return path.find(part) != std::string::npos; };
  if (has("openblas-pthread")) {
    return {
        Verdict::warning, "BLAS",
        format("OpenBLAS with threads of its own ({}): it ignores thread limits, so ranks fight "
               "for cores; install libopenblas0-openmp",
               path)};
  }
  if (has("openblas-serial")) {
    return {Verdict::warning, "BLAS",
            format("OpenBLAS without threads ({}): a rank uses one core; install "
                   "libopenblas0-openmp",
                   path)};
  }
  if (has("openblas")) return {Verdict::ok, "BLAS", format("OpenBLAS ({})", path)};
  if (has("mkl")) return {Verdict::ok, "BLAS", format("MKL ({})", path)};
  // Debian's reference BLAS is <libdir>/blas/libblas.so.3.11.0; one without a folder is built by
  // hand, from the same source as a rule.
  const std::filesystem::path file(path);
  if (file.filename().string().starts_with("libblas.so") &&
      (file.parent_path().filename() == "blas" || file.parent_path().filename() == "lib")) {
    return {Verdict::warning, "BLAS",
            format("the reference BLAS ({}): about 12 times slower than OpenBLAS; install "
                   "libopenblas0-openmp",
                   path)};
  }
  return {Verdict::ok, "BLAS", path};
}

std::string gigabytes(double bytes) { return format("{:.1f} GiB", bytes / (1 << 30)); }

}  // namespace lockstep::cli
