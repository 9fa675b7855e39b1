// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "lockstep/cli/checkpoint/verbs.h"
#include "lockstep/cli/common/options.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/checkpoint_folder.h"

namespace lockstep::cli {
namespace {

using Words = std::vector<std::string>;

std::vector<std::string> paths_in(const std::string& dir, bool all) {
  if (!all || std::filesystem::exists(dir + "/manifest.json")) return {last_checkpoint(dir)};
  std::vector<std::string> paths;
  for (const auto& found :
       formats::list_complete(config::checkpoint_folder(config::checkpoint_path(dir))))
    paths.push_back(found.path);
  if (paths.empty()) throw ConfigError(format("there is no complete checkpoint in {}", dir));
  return paths;
}

void verify_one(const std::string& path) {
  const auto start = Clock::now();
  const formats::Manifest manifest = formats::verify(path);
  const double seconds = seconds_since(start);
  const int64_t bytes = bytes_on_disk(path);
  std::cout << format("{}: sound: step {}, {}, {}, {} bytes read in {:.2f} seconds, {:.2f} GB/s\n",
                      path, manifest.step,
                      counted(static_cast<int64_t>(manifest.tensors.size()), "tensor"),
                      counted(static_cast<int64_t>(manifest.files.size()), "file"), bytes, seconds,
                      static_cast<double>(bytes) / 1e9 / std::max(seconds, 1e-9));
}

}  // namespace

int checkpoint_verify(const Words& arguments) {
  std::string dir;
  bool all = false;
  CLI::App app;
  app.add_option("DIR", dir)->required();
  app.add_flag("--all", all, "Verify every complete checkpoint in the folder, not only the newest");
  if (const auto status = parse(
          app, "checkpoint verify",
          "Reads every byte of a checkpoint and compares it with the manifest's checksums.\n"
          "Usage: lockstep checkpoint verify DIR [--all]\n"
          "DIR is a checkpoint, a run folder, or a folder of checkpoints. The exit status is 0 "
          "if no damage is found.\n",
          arguments))
    return *status;
  int failed = 0;
  for (const std::string& path : paths_in(dir, all)) {
    try {
      verify_one(path);
    } catch (const Error& failure) {
      std::cerr << format("lockstep: {}\n", failure.what());
      ++failed;
    }
  }
  return failed > 0 ? 1 : 0;
}

}  // namespace lockstep::cli
