// SPDX-License-Identifier: Apache-2.0
#include "tests/io/faulty_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "lockstep/io/file_calls.h"

namespace lockstep::io::calls {
namespace {

// A name that a power failure takes back, until its folder is synced.
struct Name {
  std::string from, to;  // `from` is empty for a new file
};

struct World {
  Fault fault = Fault::none;
  int at = 0, calls = 0;
  std::map<int, std::string> folders;  // open ones
  std::map<ino_t, int> unsynced;       // files with bytes that may be lost; a descriptor of each
  std::vector<Name> names;
};

World world;

std::string parent(const std::string& path) {
  return std::filesystem::path(path).parent_path().string();
}

void move_names(const std::string& from, const std::string& to) {
  for (auto& name : world.names) {
    for (auto* path : {&name.from, &name.to}) {
      if (path->starts_with(from + "/")) *path = to + path->substr(from.size());
    }
  }
}

[[noreturn]] void power_failure(bool names_too) {
  for (const auto& [inode, fd] : world.unsynced) {
    if (ftruncate(fd, 0) != 0) _exit(3);
  }
  while (names_too && !world.names.empty()) {
    const auto name = world.names.back();
    world.names.pop_back();
    if (name.from.empty()) {
      ::unlink(name.to.c_str());
    } else if (::rename(name.to.c_str(), name.from.c_str()) == 0) {
      move_names(name.to, name.from);
    }
  }
  _exit(137);
}

// True where the call must fail.
bool goes_wrong() {
  if (++world.calls != world.at) return false;
  if (world.fault == Fault::kill) _exit(137);
  if (world.fault == Fault::data_lost) power_failure(false);
  if (world.fault == Fault::all_lost) power_failure(true);
  errno = EIO;
  return world.fault == Fault::fail;
}

ino_t inode_of(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

}  // namespace

void arm(Fault fault, int call) {
  for (const auto& [inode, fd] : world.unsynced) ::close(fd);
  world = {};
  world.fault = fault;
  world.at = call;
}

int count() { return world.calls; }

int create(const std::string& path) {
  if (goes_wrong()) return -1;
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd >= 0) world.names.push_back({"", path});
  return fd;
}

int reserve(int fd, uint64_t size) {
  if (goes_wrong()) return -1;
  return ::fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size));
}

ssize_t write(int fd, const std::byte* bytes, size_t size) {
  if (goes_wrong()) {
    errno = ENOSPC;
    return -1;
  }
  if (world.fault == Fault::trickle && world.calls >= world.at) {
    if (world.calls % 5 == 0) {
      errno = EINTR;
      return -1;
    }
    size = std::min<size_t>(size, 7);
  }
  if (const auto inode = inode_of(fd); world.unsynced.count(inode) == 0) {
    world.unsynced[inode] = ::dup(fd);
  }
  return ::write(fd, bytes, size);
}

void start_write_back(int /*fd*/, uint64_t /*offset*/, uint64_t /*size*/) {}

int sync(int fd) {
  if (goes_wrong()) return -1;
  if (const auto folder = world.folders.find(fd); folder != world.folders.end()) {
    std::erase_if(world.names, [&](const Name& name) { return parent(name.to) == folder->second; });
    world.folders.erase(folder);
  } else if (const auto file = world.unsynced.find(inode_of(fd)); file != world.unsynced.end()) {
    ::close(file->second);
    world.unsynced.erase(file);
  }
  return 0;  // the page cache outlives the process, so there is no need to wait for a disk
}

int open_folder(const std::string& path) {
  if (goes_wrong()) return -1;
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd >= 0) world.folders[fd] = path;
  return fd;
}

int rename(const std::string& from, const std::string& to) {
  if (goes_wrong() || ::rename(from.c_str(), to.c_str()) != 0) return -1;
  move_names(from, to);
  world.names.push_back({from, to});
  return 0;
}

int make_folder(const std::string& path) { return goes_wrong() ? -1 : ::mkdir(path.c_str(), 0777); }
// Removals are never taken back: that is the harder case.
int remove_file(const std::string& path) { return goes_wrong() ? -1 : ::unlink(path.c_str()); }
int remove_folder(const std::string& path) { return goes_wrong() ? -1 : ::rmdir(path.c_str()); }

}  // namespace lockstep::io::calls
