-- ----- the installer's role -----

DO $block$
BEGIN
	PERFORM set_config('role', current_setting('idem_install.role'), true);
END $block$;
