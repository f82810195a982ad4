#include <string>
#include <vector>

#include "dispatch/kernel_table.h"
#include "parts/kernel_parts.h"

namespace qkv {
namespace {

std::vector<IsaParts>& added() {
  static std::vector<IsaParts> all;
  return all;
}

const KernelParts* find(const std::string& isa, DType dtype) {
  for (const IsaParts& parts : added())
    if (isa == parts.isa)
      return dtype == DType::f32 ? parts.f32 : dtype == DType::f64 ? parts.f64 : parts.pairs;
  return nullptr;
}

}  // namespace

bool add_parts(const IsaParts& parts) {
  added().push_back(parts);
  return true;
}

const KernelParts& active_parts(DType dtype) {
  const Implementation* implementation = &active_implementation();
  while (!find(implementation->name, dtype)) implementation = implementation->others;
  return *find(implementation->name, dtype);
}

}  // namespace qkv
