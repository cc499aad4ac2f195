"""The C11 libraries: where they lie and how Python loads them."""
