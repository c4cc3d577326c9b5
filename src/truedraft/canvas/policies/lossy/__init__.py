"""Policies that fix more at a time than step-by-step decoding: another text, faster."""
