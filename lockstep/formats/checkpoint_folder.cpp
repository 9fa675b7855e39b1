// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/checkpoint_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <map>
#include <string_view>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/io/durable.h"
#include "lockstep/io/folder_lock.h"
#include "lockstep/io/regular_file.h"

namespace lockstep::formats {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kManifest = "manifest.json";
constexpr uint64_t kMaxManifest = uint64_t{1} << 30;  // what a damaged disk may claim is not read
constexpr std::string_view kTemporary = ".tmp";       // being written, or being removed
constexpr std::string_view kAside = ".old";           // being replaced
constexpr std::string_view kBest = "best";            // a link

// What DIR has of one step, by the ends of the folders' names.
struct Remains {
  bool final = false, aside = false, temporary = false;
};

std::string path_of(const std::string& dir, int64_t step, std::string_view end = {}) {
  return format("{}/{}{}", dir, step_folder_name(step), end);
}

// Whatever it is: what does not read is reported, and is nothing to be cleared away.
bool has_manifest(const std::string& path) {
  const auto file = format("{}/{}", path, kManifest);
  std::error_code error;
  const auto status = fs::symlink_status(file, error);
  // A disk that cannot say is not one that says no.
  if (status.type() == fs::file_type::none)
    throw SystemError("cannot look at " + file, error.value());
  return fs::exists(status);
}

std::map<int64_t, Remains> scan(const std::string& dir) {
  std::map<int64_t, Remains> steps;
  std::error_code error;
  for (fs::directory_iterator entry(dir, error), last; !error && entry != last;
       entry.increment(error)) {
    const auto name = entry->path().filename().string();
    if (!name.starts_with("step-")) continue;
    int64_t step = 0;
    const char* const begin = name.data() + 5;
    const auto parsed = std::from_chars(begin, name.data() + name.size(), step);
    // Other spellings of the number are not ours.
    if (parsed.ec != std::errc() || step < 0) continue;
    const std::string_view end(parsed.ptr,
                               static_cast<size_t>(name.data() + name.size() - parsed.ptr));
    if (name != step_folder_name(step) + std::string(end)) continue;
    if (end.empty()) steps[step].final = true;
    if (end == kAside) steps[step].aside = true;
    if (end == kTemporary) steps[step].temporary = true;
  }
  if (error && error.value() != ENOENT) throw SystemError("cannot list " + dir, error.value());
  return steps;
}

// Takes a complete checkpoint away. Under its new name no reader takes it for complete, so it may
// be cut off at any point; the name must be on disk before the first file goes.
void discard(const std::string& dir, int64_t step, std::string_view end) {
  const auto temporary = path_of(dir, step, kTemporary);
  io::remove_tree(temporary);
  io::rename_path(path_of(dir, step, end), temporary);
  io::sync_folder(dir);
  io::remove_tree(temporary);
}

// Ends a replacement that was cut off: the old one goes if the new one is there, and comes back if
// it is not.
void settle(const std::string& dir, int64_t step, const Remains& remains) {
  if (!remains.aside) return;
  if (has_manifest(path_of(dir, step))) {
    discard(dir, step, kAside);
  } else {
    io::remove_tree(path_of(dir, step));
    io::rename_path(path_of(dir, step, kAside), path_of(dir, step));
    io::sync_folder(dir);
  }
}

std::optional<Checkpoint> complete(const std::string& dir, int64_t step) {
  for (const auto end : {std::string_view{}, kAside}) {
    const auto path = path_of(dir, step, end);
    if (has_manifest(path)) return Checkpoint{step, path};
  }
  return std::nullopt;
}

void require_sizes(const Manifest& manifest, const std::string& folder) {
  for (const auto& [name, record] : manifest.files) {
    const auto path = folder + "/" + name;
    struct stat status {};
    if (lstat(path.c_str(), &status) != 0) {
      throw CheckpointError(format("{}: {}", path, std::generic_category().message(errno)));
    }
    io::require_regular(path, status.st_mode);
    const auto size = static_cast<uint64_t>(status.st_size);
    if (size != record.bytes) {
      throw CheckpointError(
          format("{}: has {} bytes, its manifest says {}", path, size, record.bytes));
    }
  }
}

// Warns where it is not sound.
bool is_sound(const Checkpoint& checkpoint) {
  try {
    const auto manifest = read_manifest(checkpoint.path);
    if (manifest.step == checkpoint.step) return true;
    log::warn(format("checkpoint {} is skipped: its manifest is of step {}", checkpoint.path,
                     manifest.step));
  } catch (const Error& failure) {
    log::warn(format("checkpoint {} is skipped: {}", checkpoint.path, failure.what()));
  }
  return false;
}

}  // namespace

std::string step_folder_name(int64_t step) {
  if (step < 0) throw ConfigError(format("[checkpoint] step {}, must be at least 0", step));
  return format("step-{:08}", step);
}

void check_writable(const std::string& dir) {
  try {
    io::make_folders(dir);
    const auto path = format("{}/.write-test-{}", dir, getpid());
    io::write_text(path, "test");
    io::remove_tree(path);
  } catch (const SystemError& failure) {
    throw ConfigError(format("checkpoint folder {} cannot be written: {}", dir, failure.what()));
  }
  io::FolderLock::require_free(dir);
}

std::string begin_checkpoint(const std::string& dir, int64_t step) {
  io::make_folders(dir);
  settle(dir, step, scan(dir)[step]);
  std::string temporary = path_of(dir, step, kTemporary);
  io::remove_tree(temporary);
  io::make_folders(temporary);
  return temporary;
}

std::string commit_checkpoint(const std::string& dir, const Manifest& manifest,
                              const io::FolderLock* lock) {
  const auto require_held = [lock] {
    if (lock != nullptr) lock->require_held();
  };
  require_held();  // before anything of the folder is changed
  const auto temporary = path_of(dir, manifest.step, kTemporary);
  std::string final = path_of(dir, manifest.step);
  const auto aside = path_of(dir, manifest.step, kAside);
  settle(dir, manifest.step, scan(dir)[manifest.step]);
  manifest.validate(temporary);
  require_sizes(manifest, temporary);
  io::write_text(format("{}/{}", temporary, kManifest), manifest.to_json());
  io::sync_folder(temporary);
  require_held();  // again: a disk may have kept this process waiting
  const bool replaces = has_manifest(final);
  if (replaces) {
    io::rename_path(final, aside);
  } else {
    io::remove_tree(final);
  }
  io::rename_path(temporary, final);
  io::sync_folder(dir);
  if (replaces) discard(dir, manifest.step, kAside);
  return final;
}

void abandon_checkpoint(const std::string& dir, int64_t step) {
  settle(dir, step, scan(dir)[step]);
  io::remove_tree(path_of(dir, step, kTemporary));
}

std::vector<Checkpoint> list_complete(const std::string& dir) {
  std::vector<Checkpoint> checkpoints;
  for (const auto& [step, remains] : scan(dir)) {
    if (auto found = complete(dir, step)) checkpoints.push_back(*std::move(found));
  }
  return checkpoints;
}

std::optional<Checkpoint> newest_complete(const std::string& dir, int64_t before) {
  auto checkpoints = list_complete(dir);
  std::erase_if(checkpoints, [&](const auto& checkpoint) { return checkpoint.step >= before; });
  const auto found = std::find_if(checkpoints.rbegin(), checkpoints.rend(), is_sound);
  return found == checkpoints.rend() ? std::nullopt : std::optional(*found);
}

std::vector<Checkpoint> list_sound(const std::string& dir) {
  auto checkpoints = list_complete(dir);
  std::reverse(checkpoints.begin(), checkpoints.end());
  std::erase_if(checkpoints, [](const Checkpoint& checkpoint) {
    try {
      return verify(checkpoint.path).step != checkpoint.step;
    } catch (const Error&) {
      return true;
    }
  });
  return checkpoints;
}

Manifest read_manifest(const std::string& path) {
  const io::RegularFile file(format("{}/{}", path, kManifest));
  if (file.size() > kMaxManifest) {
    throw CheckpointError(
        format("{}: has {} bytes, must have at most {}", file.path(), file.size(), kMaxManifest));
  }
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  auto manifest = Manifest::from_json(text, file.path());
  require_sizes(manifest, path);
  return manifest;
}

void link_best(const std::string& dir, int64_t step) {
  if (best_step(dir) == step || !has_manifest(path_of(dir, step))) return;
  io::replace_link(step_folder_name(step), format("{}/{}", dir, kBest));
}

std::optional<int64_t> best_step(const std::string& dir) {
  std::error_code error;
  const fs::path target = fs::read_symlink(format("{}/{}", dir, kBest), error);
  if (error) return std::nullopt;
  for (const Checkpoint& each : list_complete(dir)) {
    if (target == step_folder_name(each.step)) return each.step;
  }
  return std::nullopt;
}

void prune(const std::string& dir, int keep) {
  if (keep < 1) throw ConfigError(format("[prune] keep {}, must be at least 1", keep));
  const auto steps = scan(dir);
  for (const auto& [step, remains] : steps) settle(dir, step, remains);
  auto checkpoints = list_complete(dir);
  std::erase_if(checkpoints, [](const auto& checkpoint) { return !is_sound(checkpoint); });
  if (checkpoints.empty()) return;
  const auto removed = checkpoints.size() - std::min(checkpoints.size(), static_cast<size_t>(keep));
  const std::optional<int64_t> best = best_step(dir);
  for (size_t i = 0; i < removed; ++i) {
    if (checkpoints[i].step != best) discard(dir, checkpoints[i].step, {});
  }
  for (const auto& [step, remains] : steps) {
    if (remains.temporary && step <= checkpoints.back().step) {
      io::remove_tree(path_of(dir, step, kTemporary));
    }
  }
}

}  // namespace lockstep::formats
