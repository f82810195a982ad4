// Keeps libqkv_core.so from asking for a newer libstdc++ than torch does, as common/old_glibc.h
// does for glibc: GCC 11 gave copies of vectors a function of its own for a length that is too
// large (GLIBCXX_3.4.29). One of ours takes its place within the library. It is weak, since a
// program that is linked with -static has the one of its libstdc++, too.
#include <new>

#ifdef __GLIBCXX__
extern "C" {
[[noreturn]] __attribute__((visibility("hidden"), weak)) void
qkv_throw_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void qkv_throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}
#endif
