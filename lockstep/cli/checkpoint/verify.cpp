// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "lockstep/cli/checkpoint/verbs.h"
#include "lockstep/cli/common/options.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/mapped_file.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/launch/rendezvous/hmac.h"

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

std::string in_hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) text += format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

// What `sha256sum * | sha256sum` prints in the checkpoint's folder.
std::string sha256_of(const std::string& path) {
  std::map<std::string, std::string> lines;
  for (const auto& file : std::filesystem::directory_iterator(path)) {
    const MappedFile content(file.path().string());
    const std::string name = file.path().filename();
    lines[name] =
        format("{}  {}\n",
               in_hex(launch::sha256(
                   {reinterpret_cast<const char*>(content.bytes().data()), content.size()})),
               name);
  }
  std::string all;
  for (const auto& [name, line] : lines) all += line;
  return in_hex(launch::sha256(all));
}

void require_sha256(const std::string& path, const std::string& expected) {
  const std::string actual = sha256_of(path);
  if (actual != expected)
    throw CheckpointError(format("{}: its SHA-256 is {}, expected {}", path, actual, expected));
}

void verify_one(const std::string& path, const std::string& expected) {
  const auto start = Clock::now();
  const formats::Manifest manifest = formats::verify(path);
  if (!expected.empty()) require_sha256(path, expected);
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
  std::string expected;
  bool all = false;
  CLI::App app;
  app.add_option("DIR", dir)->required();
  app.add_flag("--all", all, "Verify every complete checkpoint in the folder, not only the newest");
  app.add_option(
         "--expect-sha256", expected,
         "Refuse a checkpoint with another hash than this, in 64 hexadecimal digits. In its "
         "folder, `sha256sum * | sha256sum` prints it")
      ->check([](const std::string& text) {
        const bool is_hash =
            text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
        return is_hash ? std::string() : "'" + text + "' must be 64 digits out of 0-9 and a-f";
      })
      ->excludes("--all");
  if (const auto status = parse(
          app, "checkpoint verify",
          "Reads every byte of a checkpoint and compares it with the manifest's checksums.\n"
          "Usage: lockstep checkpoint verify DIR [--all | --expect-sha256 HASH]\n"
          "DIR is a checkpoint, a run folder, or a folder of checkpoints. The exit status is 0 "
          "if no damage is found.\n",
          arguments))
    return *status;
  int failed = 0;
  for (const std::string& path : paths_in(dir, all)) {
    try {
      verify_one(path, expected);
    } catch (const Error& failure) {
      std::cerr << format("lockstep: {}\n", failure.what());
      ++failed;
    }
  }
  return failed > 0 ? 1 : 0;
}

}  // namespace lockstep::cli
