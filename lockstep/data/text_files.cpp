// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/text_files.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/format.h"
#include "lockstep/core/philox.h"
#include "lockstep/data/tokens/token_file.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

constexpr const char* kForms =
    "give a file, a folder, a pattern, or several of these separated by commas";

std::optional<struct stat> status_of(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return std::nullopt;
  return status;
}

enum class Content { usable, empty, binary, unreadable };

Content content_of(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return Content::unreadable;
  char start[8192];
  const ssize_t count = read(fd.get(), start, sizeof start);
  if (count < 0) return Content::unreadable;
  if (count == 0) return Content::empty;
  if (is_token_file(path)) return Content::usable;
  const bool zero = std::memchr(start, 0, static_cast<size_t>(count)) != nullptr;
  return zero ? Content::binary : Content::usable;
}

// Text that was meant as records: a .json file that begins with a list of objects.
bool is_json_list(const std::string& path) {
  if (!path.ends_with(".json")) return false;
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  char start[8192];
  const ssize_t count = fd.valid() ? read(fd.get(), start, sizeof start) : 0;
  std::string_view text(start, static_cast<size_t>(std::max<ssize_t>(count, 0)));
  for (const char bracket : {'[', '{'}) {
    text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
    if (!text.starts_with(bracket)) return false;
    text.remove_prefix(1);
  }
  return true;
}

// Part of a Megatron pair, and read with the other half.
bool is_token_index(const std::string& path) {
  return path.ends_with(".idx") && status_of(path.substr(0, path.size() - 4) + ".bin").has_value();
}

class Search {
 public:
  void add(const std::string& part) {
    const auto status = status_of(part);
    if (status && S_ISDIR(status->st_mode)) {
      std::vector<std::string> found;
      collect(part, found);
      add_sample(std::move(found), part);
    } else if (status) {
      add_named(part, *status);
    } else if (part.find_first_of("*?[") != std::string::npos) {
      add_pattern(part);
    } else {
      throw ConfigError(format("data path {}: {}; {}", part, std::strerror(errno), kForms));
    }
  }

  DataFiles take() { return std::move(files_); }

 private:
  void add_named(const std::string& path, const struct stat& status) {
    if (!S_ISREG(status.st_mode)) {
      throw ConfigError(format("data path {}: is neither a file nor a folder", path));
    }
    switch (content_of(path)) {
      case Content::usable:
        if (!is_json_list(path)) return keep(path, status);
        throw ConfigError(format(
            "data path {}: is a JSON list of objects; write one object per line to a .jsonl file",
            path));
      case Content::empty:
        throw ConfigError(format("data path {}: the file is empty", path));
      case Content::binary:
        throw ConfigError(format(
            "data path {}: has zero bytes, so it is not text; files of token ids end in .bin",
            path));
      case Content::unreadable:
        throw ConfigError(format("data path {}: cannot be read", path));
    }
  }

  void add_pattern(const std::string& pattern) {
    glob_t matches{};
    const int result = glob(pattern.c_str(), 0, nullptr, &matches);
    std::vector<std::string> found;
    for (size_t i = 0; result == 0 && i < matches.gl_pathc; ++i) {
      const std::string match = matches.gl_pathv[i];
      if (fs::is_directory(match)) {
        collect(match, found);
      } else {
        found.push_back(match);
      }
    }
    globfree(&matches);
    if (result == GLOB_NOMATCH) {
      throw ConfigError(format("data path {}: no file fits the pattern", pattern));
    }
    if (result != 0) throw ConfigError(format("data path {}: cannot be searched", pattern));
    const size_t slash = pattern.substr(0, pattern.find_first_of("*?[")).rfind('/');
    add_sample(std::move(found), slash == std::string::npos ? "." : pattern.substr(0, slash + 1));
  }

  // Links to files count, links to folders do not: they may lead back here.
  void collect(const std::string& folder, std::vector<std::string>& found) {
    std::error_code failure;
    fs::directory_iterator entries(folder, failure);
    if (failure) {
      ++files_.unreadable;
      return;
    }
    for (const fs::directory_entry& entry : entries) {
      const fs::path& path = entry.path();
      if (path.filename().native().starts_with('.')) continue;
      if (entry.is_directory(failure) && !entry.is_symlink(failure)) {
        collect(path, found);
      } else {
        found.push_back(path);
      }
    }
  }

  // By a hash, because names group what is alike: the last files by name are one project, one
  // author, one year, and they are what is held out for validation.
  void add_sample(std::vector<std::string> found, const std::string& base) {
    std::vector<std::pair<uint64_t, std::string>> order;
    order.reserve(found.size());
    for (std::string& path : found) {
      const std::string relative = fs::path(path).lexically_relative(base).generic_string();
      order.emplace_back(random_key(0, "file order", relative).tensor, std::move(path));
    }
    std::sort(order.begin(), order.end());
    for (const auto& [hash, path] : order) add_found(path);
  }

  void add_found(const std::string& path) {
    const auto status = status_of(path);
    if (!status) {
      ++files_.unreadable;
      return;
    }
    if (!S_ISREG(status->st_mode) || status->st_size == 0 || is_token_index(path)) return;
    switch (content_of(path)) {
      case Content::usable:
        return keep(path, *status);
      case Content::empty:
        return;
      case Content::binary:
        ++files_.binary;
        return;
      case Content::unreadable:
        ++files_.unreadable;
        return;
    }
  }

  void keep(const std::string& path, const struct stat& status) {
    if (seen_.emplace(status.st_dev, status.st_ino).second) files_.paths.push_back(path);
  }

  DataFiles files_;
  std::set<std::pair<dev_t, ino_t>> seen_;
};

}  // namespace

DataFiles find_data_files(const std::string& path) {
  if (path.empty()) throw ConfigError(format("data path: is empty; {}", kForms));
  Search search;
  if (status_of(path)) {  // a name may have a comma in it
    search.add(path);
  } else {
    size_t begin = 0;
    while (begin <= path.size()) {
      const size_t end = std::min(path.find(',', begin), path.size());
      if (end > begin) search.add(path.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  DataFiles files = search.take();
  if (files.paths.empty()) {
    throw ConfigError(
        format("data path {}: has no file to read: {} binary and {} unreadable files were skipped, "
               "and all empty and hidden files; {}",
               path, files.binary, files.unreadable, kForms));
  }
  return files;
}

bool is_token_file(const std::string& path) { return path.ends_with(".bin"); }

}  // namespace lockstep::data
