// Whoever gets this is signed in, and has followed a link from elsewhere: see `not_signed_in` in pages.py.
document.forms[0].submit();
