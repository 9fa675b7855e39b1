// SPDX-License-Identifier: Apache-2.0
// The system calls by which a checkpoint reaches the disk, results and errno as the system's. They
// are one source file of their own so that a test can link another in its place, which fails or
// dies at a call of its choice.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace lockstep::io::calls {

int create(const std::string& path);  // a new, empty file, open for writing
int reserve(int fd, uint64_t size);   // space for so many bytes; the file stays empty
ssize_t write(int fd, const std::byte* bytes, size_t size);
// The system begins to write these bytes to the disk. Only a hint; what fails, fails in sync() too.
void start_write_back(int fd, uint64_t offset, uint64_t size);
int sync(int fd);
int open_folder(const std::string& path);
int rename(const std::string& from, const std::string& to);
int make_folder(const std::string& path);
int remove_file(const std::string& path);
int remove_folder(const std::string& path);

}  // namespace lockstep::io::calls
