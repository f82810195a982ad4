// Symbols are hidden unless marked.
#pragma once

#define QKV_API __attribute__((visibility("default")))
