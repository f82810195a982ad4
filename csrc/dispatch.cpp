#include <stdexcept>
#include <string>

#include "attention.h"

namespace qkv {
std::vector<const char*> supported_isas() { return {"generic"}; }
const char* active_isa() { return "generic"; }
void set_isa(const char* name) {
  if (std::string(name) != "generic") throw std::invalid_argument(name);
}
}  // namespace qkv
